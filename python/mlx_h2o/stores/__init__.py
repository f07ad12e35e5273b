"""Stores of one layer's rows: dense, quantised, of mixed precision, latent."""

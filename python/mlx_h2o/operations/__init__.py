"""The operations: checks and requests, the back ends that serve them, and their definitions."""

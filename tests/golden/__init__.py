"""Golden vectors: one generator, one committed file, read by the tests of every language."""

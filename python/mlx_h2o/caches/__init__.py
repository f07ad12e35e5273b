"""The caches: a table of rows under a budget, for one sequence and for many."""

from . import batch, quantized  # noqa: F401  (they name themselves to the class of one sequence)

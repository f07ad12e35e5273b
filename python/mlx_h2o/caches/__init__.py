"""The caches: a table of rows under a budget, for one sequence and for many."""

# Wherever one is, the others are known to it.
from . import batch as batch
from . import quantized as quantized

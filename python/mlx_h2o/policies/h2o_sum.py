"""h2o-sum: keep the rows with the most attention so far (Zhang et al. 2023, H2O, sec. 4)."""

from .base import ByScores


class H2OSum(ByScores):
    """Ranks rows by attention mass: their weights, summed over all queries since they were added.

    They are also summed over the query heads of the KV head. Nothing decays, so older rows have an
    advantage, which the recent window has to compensate.
    """

    name = "h2o-sum"
    needs_positions = False
    needs_weights = True
    chunk_queries = None
    kind = "mass"

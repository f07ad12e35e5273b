"""Faults of the caches: each is noticed by a life against the slow reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from cache_courses import Course
from faults.change import argument, assigned, called, condition, replaced, returned
from faults.place import Fault, assert_caught
from mlx_h2o import load_prompt_cache, save_prompt_cache, use_backend
from test_budgets import (
    test_a_batch_of_unequal_budgets_that_is_not_routed_is_refused as refused_batch,
)
from test_budgets import (
    test_gemma2_reads_the_masks_of_batches as grouped_mask,
)
from test_budgets import (
    test_models_that_share_a_mask_read_each_layers_own as shared_mask,
)
from test_cache_contract import (
    test_who_looks_lets_the_surplus_go as looking,
)
from test_cache_mixed import (
    test_a_chunk_below_the_budget_is_packed_at_once as chunk_of_few,
)
from test_cache_mixed import (
    test_recoded_rows_keep_the_upper_bits_or_all as recoded_rows,
)
from test_cache_mixed import (
    test_the_light_rows_are_those_of_lower_rank_when_they_leave as light_rows,
)
from test_cache_scores import (
    test_nothing_goes_from_a_chunk_without_scores as without_scores,
)
from test_failing_steps import (
    test_a_step_that_fails as failing_step,
)
from test_folding import (
    test_a_long_chunk_reads_and_scores_a_row_of_n_as_n as long_chunk,
)
from test_folding import (
    test_no_token_is_lost as no_token_lost,
)
from test_folding import (
    test_rows_are_dropped_where_that_is_asked_for as rows_dropped,
)
from test_folding import (
    test_sinks_and_the_recent_window_are_as_they_came as protected_rows,
)
from test_folding import (
    test_the_mean_is_weighted_by_mass_and_by_the_length_of_the_value as weighted_mean,
)
from test_frame import NOTICES


def composed(check: Callable[[], None]) -> None:
    """The check on the definitions, which the native back end has its own of."""
    with use_backend("composed"):
        check()


def life(column: str = "dense", policy: str = "h2o-ema", **settings) -> None:
    """One sequence: chunks, tokens, a trim and copies."""
    course = Course(column, policy, **{"evict_every": 4} | settings)
    course.chunk(5)
    course.trim(2)
    course.chunk(20)
    course.tokens(10)
    course.chunk(3)
    course.tokens(4)
    course.copied("state").tokens(2)
    course.copied().tokens(2)


def batch(column: str = "dense", policy: str = "h2o-ema", **settings) -> None:
    """Sequences of any length that come and go."""
    course = Course(column, policy, 3, **{"evict_every": 4} | settings)
    course.prompts([5, 30, 9], step=12)
    course.tokens(9)
    course.prompts([3, 1, 20])
    course.filter([2, 0])
    other = course.new(1, 5)
    other.prompts([6])
    course.extend(other)
    course.tokens(6)
    course.extract(2).tokens(2)


def drafts(column: str = "dense", policy: str = "h2o-ema", **settings) -> None:
    """Tokens that are taken back, beyond the budget."""
    course = Course(column, policy, **{"speculative": 3, "evict_every": 4} | settings)
    course.chunk(20)
    for accepted, rejected in ((1, 3), (4, 0), (0, 4), (2, 2), (1, 0), (1, 3)):
        course.draft(accepted, rejected)
    course.draft(2, 2, at_once=False)
    course.tokens(6)


def damaged_file(damage: Callable[[bytes], bytes], said: str) -> None:
    course = Course()
    course.chunk(5)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        save_prompt_cache(file, [course.cache])
        file.write_bytes(damage(file.read_bytes()))
        try:
            load_prompt_cache(file)
            found = "it was read"
        except ValueError as error:
            found = str(error)
        assert said in found


def truncated_file() -> None:
    damaged_file(lambda whole: whole[:-4], "bytes, expected")


def flipped_bit() -> None:
    damaged_file(lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), "not what was written")


def padded_on_the_left() -> None:
    course = Course(batch=2)
    course.prompts([3, 8], step=4, left=True)
    course.tokens(8)


def unscored() -> None:
    cache = Course().cache
    rows = [mx.zeros((1, 2, 1, 32))] * 2
    cache.update_and_fetch(*rows)
    try:
        cache.update_and_fetch(*rows)
    except RuntimeError:
        return
    raise AssertionError("an update without scores went through")


def codes() -> None:
    recoded_rows(8, 4, mx.float32)


FAULTS = [
    Fault(
        "the recent window is off by one",
        "caches.cache:H2OKVCache._evict",
        argument("Eviction", "recent_start").becomes("[n + 1 for n in _]"),
        partial(life, policy="random", recent_size=9),
    ),
    Fault(
        "the surplus goes as if a token came",
        "caches.cache:H2OKVCache._make_room",
        argument("_evict", 3, at=1).becomes("[2] * len(self._tokens)"),
        partial(life, policy="random", heavy_size=0, recent_size=12),
    ),
    Fault(
        "who looks sees the surplus",
        "caches.cache:H2OKVCache._at_rest",
        condition(of="_surplus").becomes("False"),
        partial(looking, "dense", "size"),
    ),
    Fault(
        "rows go before attention has scored them",
        "caches.cache:H2OKVCache._at_rest",
        condition(of="_unscored").becomes("table is not None"),
        without_scores,
    ),
    Fault(
        "a chunk is packed at the next eviction",
        "caches.cache:H2OKVCache._make_room",
        assigned("due", at=0).becomes("[n for n, (rows, new) in both if rows > self._budget]"),
        chunk_of_few,
    ),
    Fault(
        "the last row of the budget stays empty",
        "caches.cache:H2OKVCache._kept",
        replaced("<=", "<", at=1),
        drafts,
    ),
    Fault(
        "groups are as large as the settings say, whatever is protected",
        "caches.cache:H2OKVCache._kept",
        argument("min", 1).becomes("rows"),
        partial(drafts, heavy_size=12, recent_size=0, evict_every=16),
    ),
    Fault(
        "a fast step does not ask for scores",
        "caches.cache:H2OKVCache._check_scored",
        condition(of="_unscored").becomes("False"),
        unscored,
    ),
    Fault(
        "an eviction names the wrong keep",
        "caches.eviction:Eviction.first",
        assigned("keep").becomes("max(0, _ - 1) if self.tail else _"),
        drafts,
    ),
    Fault(
        "sinks are not protected",
        "caches.eviction:Eviction.kept",
        argument("keep_indices", "sink_size").becomes("0"),
        life,
    ),
    Fault(
        "heads that share choose by themselves",
        "caches.eviction:Eviction.ranks",
        condition(of="shared_heads").becomes("False"),
        partial(life, shared_heads=True),
    ),
    Fault(
        "ranks are of all rows, drafts too",
        "caches.cache:H2OKVCache._evict",
        argument("Eviction", "tail").becomes("0"),
        partial(drafts, policy="keydiff"),
    ),
    Fault(
        "rejected queries leave their scores",
        "caches.cache:H2OKVCache._take_back",
        argument("_cut_waiting", "end").becomes("self._tokens[0]"),
        drafts,
    ),
    Fault(
        "what waits is taken in at once",
        "caches.cache:H2OKVCache._make_room",
        argument("_settle_waiting", 0, at=2).becomes("self._tokens[0]"),
        drafts,
    ),
    Fault(
        "what a held query did not see counts as seen",
        "caches.scored:ScoredRows._settle_waiting",
        assigned("rows").becomes("table.width"),
        partial(drafts, policy="snapkv"),
    ),
    Fault(
        "tokens lie where they come, padding or not",
        "caches.masks:mask_of",
        assigned("place_of").becomes("before + token"),
        padded_on_the_left,
    ),
    Fault(
        "a token sees the one that comes after it",
        "caches.masks:mask_of",
        assigned("newest").becomes("own & (slots <= place_of + 1)"),
        batch,
    ),
    Fault(
        "unused packed slots are seen",
        "caches.masks:mask_of",
        replaced("<", "<=", at=1),
        partial(batch, column="8 and 4"),
    ),
    Fault(
        "all sequences are given the protected range of the first",
        "caches.eviction:Eviction.kept",
        argument("keep_indices", "recent_start").becomes("self.recent_start[0]"),
        partial(batch, policy="random"),
    ),
    Fault(
        "sequences that stay are evicted from too",
        "caches.eviction:Eviction.run",
        assigned("rows", at=2).becomes("[self.keep] * len(table.lengths)"),
        batch,
    ),
    Fault(
        "padding on the left is not waited for",
        "caches.batch:BatchH2OKVCache._next_spans",
        assigned("start").becomes("0"),
        padded_on_the_left,
    ),
    Fault(
        "positions are lost when sequences leave or join",
        "caches.lines:_stacked",
        argument("place", 0).becomes("None"),
        batch,
    ),
    Fault(
        "keys are moved by their centre when they come back, the wrong way",
        "caches.frame:Frame.back",
        replaced("+", "-"),
        NOTICES["rows"],
    ),
    Fault(
        "queries are not rotated",
        "caches.frame:Frame.query",
        returned().becomes("queries"),
        NOTICES["attention"],
    ),
    Fault(
        "scores lack the centre of the keys",
        "caches.frame:Frame.shift",
        returned().becomes("0 * _"),
        NOTICES["attention"],
    ),
    Fault(
        "a sink counts as much whatever the centre of the keys",
        "caches.frame:Frame.shift",
        returned().becomes("0 * _"),
        NOTICES["sinks"],
    ),
    Fault(
        "a line that joins without rows has no frame of its own",
        "caches.frame:Frame.starting",
        condition(of="shared").becomes("self.shared or not all(starts)"),
        NOTICES["lines"],
    ),
    Fault(
        "rows have no centre",
        "caches.frame:_centre",
        returned(at=3).becomes("0 * _"),
        NOTICES["bias"],
    ),
    Fault(
        "the newest rows are packed with the others",
        "caches.tiers:planned",
        argument("min", 2, at=1).becomes("0"),
        partial(life, column="8 and 4"),
    ),
    Fault(
        "the light rows are those of higher rank",
        "caches.tiers:_split",
        returned().becomes("_[::-1]"),
        light_rows,
    ),
    Fault(
        "a code that lost bits stands for the lowest of its levels",
        "operations.recoding:recoded",
        assigned("middle").becomes("biases.astype(mx.float32)"),
        codes,
    ),
    Fault(
        "what goes with the rows stays where it was",
        "caches.table:Table.close_gaps",
        assigned("self.beside").becomes("self.beside"),
        partial(life, policy="h2o"),
    ),
    Fault(
        "the context is a token longer",
        "caches.cache:H2OKVCache._evict",
        argument("Eviction", "context_start").becomes("[start - 1 for start in _]"),
        partial(life, policy="random", context_size=9, recent_size=4),
    ),
    Fault(
        "rows are never too far back",
        "caches.eviction:Eviction.ranks",
        condition(of="context_start").becomes("True"),
        partial(life, policy="keydiff", context_size=16),
    ),
    Fault(
        "all sequences have the context of the first",
        "caches.eviction:Eviction.ranks",
        assigned("start").becomes("self.context_start[0]"),
        partial(batch, policy="random", context_size=12),
    ),
    Fault(
        "a row that leaves is folded",
        "operations.folding:fold",
        assigned("lost", at=0).becomes("mx.min(apart, axis=3) == mx.inf"),
        partial(composed, partial(life, policy="h2o", context_size=16)),
    ),
    Fault(
        "attention is not told how many rows one stands for",
        "caches.stored:StoredRows.row_bias",
        returned().becomes("None"),
        partial(life, policy="h2o"),
    ),
    Fault(
        "the bias is not added to the logits of a chunk",
        "caches.scored:ScoredRows._biases",
        returned().becomes("None"),
        partial(long_chunk, None),
    ),
    Fault(
        "the bias is not added to the scores of a chunk",
        "caches.scored:ScoredRows.score_chunk",
        assigned("bias", at=1).becomes("None"),
        partial(long_chunk, None),
    ),
    Fault(
        "rows are folded where they are to be dropped",
        "config:H2OConfig.folds",
        returned().becomes("policies.known(self.policy).folds"),
        partial(rows_dropped, "dense"),
    ),
    Fault(
        "the count of a folded row is not written",
        "caches.folding:fold",
        assigned("table.beside[name]").becomes("table.beside[name]"),
        partial(no_token_lost, "dense", 1),
    ),
    Fault(
        "the rows that go are not counted",
        "operations.folding:fold",
        called("astype", of="meets").becomes("mx.zeros(meets.shape)"),
        partial(composed, partial(no_token_lost, "8 bits", 4)),
    ),
    Fault(
        "rows weigh alike in a mean",
        "operations.folding:fold",
        assigned("weights").becomes("mx.ones_like(weights)"),
        partial(composed, weighted_mean),
    ),
    Fault(
        "rows are folded into sinks",
        "caches.folding:fold",
        assigned("free").becomes("rows.positions < start"),
        partial(protected_rows, "dense", 0),
    ),
    Fault(
        "rows are folded into rows that go",
        "operations.folding:fold",
        assigned("stays").becomes("mx.ones(eligible.shape, mx.bool_)"),
        partial(composed, partial(no_token_lost, "dense", 4)),
    ),
    Fault(
        "the mass is that of the last query alone",
        "operations.composed_cache:add_mass",
        called("sum").becomes("weights[:, :, -1]"),
        partial(composed, partial(life, policy="h2o")),
    ),
    Fault(
        "no place is kept for diverse rows",
        "policies.h2o:H2O.rank",
        assigned("diverse").becomes("0"),
        partial(life, policy="h2o"),
    ),
    Fault(
        "the rows of other sequences are written over",
        "caches.folding:_written",
        condition().becomes("True"),
        partial(batch, policy="h2o"),
    ),
    Fault(
        "a layer is given the mask of rows before its last update",
        "caches.cache:H2OKVCache.mask_of_update",
        assigned("before").becomes("list(tail)"),
        partial(shared_mask, "deepseek_v3", "keydiff"),
    ),
    Fault(
        "a batch of unequal budgets has the mask of its first layer",
        "caches.cache:H2OKVCache.make_mask",
        condition(of="_in_batch").becomes("False"),
        partial(shared_mask, "qwen3", "h2o"),
    ),
    Fault(
        "a batch forgets that budgets are unequal",
        "caches.batch:BatchH2OKVCache.merge",
        assigned("batch.unequal_budgets").becomes("False"),
        partial(shared_mask, "qwen3", "h2o"),
    ),
    Fault(
        "attention of ours is refused the masks of unequal budgets",
        "caches.cache:H2OKVCache.mask_of_update",
        assigned("self._own_mask_due").becomes("True"),
        refused_batch,
    ),
    Fault(
        "a mask takes sequences for groups of heads",
        "caches.cache:H2OKVCache._mask",
        condition().becomes("False"),
        partial(grouped_mask, 2, {}),
    ),
    Fault(
        "a step that fails leaves rows that look right",
        "caches.cache:H2OKVCache._give_up",
        assigned("self._table").becomes("self._table"),
        partial(failing_step, "dense", "h2o-ema", "surplus", "flush"),
    ),
    Fault(
        "a file may be shorter than it says",
        "lm.safetensors:read_header",
        replaced("!=", ">", at=2),
        truncated_file,
    ),
    Fault(
        "a file may hold something else than was written",
        "lm.checksum:is_whole",
        returned(of="_of_file").becomes("True"),
        flipped_bit,
    ),
    Fault(
        "the checksum is that of the header alone",
        "lm.checksum:_of_file",
        assigned("part").becomes("b''"),
        flipped_bit,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)

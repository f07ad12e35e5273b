"""Seeded faults in batches, speculation and files: each is caught by the checks of the suite."""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from batch_checks import HEADS, Lone, chunk, decode
from mlx_h2o import H2OConfig, H2OKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_h2o.caches.speculative_cache import cache_of
from routing_checks import SETTINGS
from test_batch import check
from test_cache_faults import Fault, put_in_place
from test_draft_model import drafted
from test_linked import linked_drafts, sequences_that_come_and_go
from test_speculation import Tokens, config, equal
from tiny_models import tiny_qwen3


def _pair(**given):
    chosen = H2OConfig(max_kv_size=12, sink_size=2, recent_size=4, policy="h2o", **given)
    batch = H2OKVCache.merge([H2OKVCache(chosen) for _ in range(2)])
    return batch, [Lone(chosen, seed) for seed in (1, 2)]


def sequences_of_a_batch():
    for evict_every in (1, 3):
        batch, alone = _pair(evict_every=evict_every)
        chunk(batch, alone, [10, 4], step=16)
        decode(batch, alone, 16)
        check(batch, alone)


def long_prompts_of_a_batch():
    batch, alone = _pair()
    chunk(batch, alone, [150, 20], step=200)
    check(batch, alone)


def rewound_drafts():
    tokens = Tokens(3)
    cache, other = (cache_of(config()) for _ in range(2))
    for one in (cache, other):
        tokens.feed(one, 20)
        for _ in range(3):
            tokens.feed(one, 1)
    for _ in range(3):
        tokens.feed(cache, 1, 2)
        cache.trim(2)
        tokens.feed(other, 1)
        tokens.feed(cache, 0, 1)
        tokens.feed(cache, 0, 1)
        cache.trim(2)
        tokens.feed(cache, 0, 2)
        cache.trim(2)
        equal(cache, other)


def drafts_without_a_window():
    tokens, chosen = Tokens(4), config("h2o", recent_size=0, max_kv_size=4, heavy_size=3)
    cache = cache_of(chosen)
    for _ in range(30):
        tokens.feed(cache, 1)
        newest = list(range(max(0, cache.offset - 5), cache.offset))  # one more is just committed
        found = np.sort(np.array(cache.positions)[0], axis=1)[:, -len(newest) :].tolist()
        assert found == [newest] * HEADS


def steps_in_place():
    tokens = Tokens(5)
    cache, other = (cache_of(config(recent_size=0, heavy_size=7, speculative=4)) for _ in range(2))
    for one in (cache, other):
        tokens.feed(one, 20)
    other._store.by_slot = False  # gathers
    for turn in range(24):
        for one in (cache, other):
            tokens.feed(one, (1, 1, 4, 1, 3, 5)[turn % 6])
        equal(cache, other)


def drafts_of_a_model():
    model, draft = tiny_qwen3(), tiny_qwen3(layers=1)
    caches = make_prompt_cache(model, 16, **SETTINGS) + make_prompt_cache(draft, 16, **SETTINGS)
    complaint = _complaint(lambda: drafted(model, draft, caches))
    assert "[speculative_generate_step]" in complaint  # evicted rows would have to come back


def _complaint(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def _cache() -> H2OKVCache:
    cache = H2OKVCache(H2OConfig(max_kv_size=8, policy="window", sink_size=1))
    tokens = Lone(cache.config, 1).next(5)
    cache.update_and_fetch(*(mx.array(part[None]) for part in tokens[1:]))
    return cache


def truncated_files():
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        save_prompt_cache(file, [_cache()])
        file.write_bytes(file.read_bytes()[:-4])
        assert "is damaged" in _complaint(lambda: load_prompt_cache(file))


def interrupted_saves():
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / "cache.safetensors"
        save_prompt_cache(file, [_cache()])
        assert file.exists()
        before = file.read_bytes()

        def fails(name, *_):
            Path(name).write_bytes(b"half")
            raise OSError("no space left")

        patch.setattr("mlx.core.save_safetensors", fails)
        with pytest.raises(OSError, match="no space left"):
            save_prompt_cache(file, [_cache()])
        assert file.read_bytes() == before


FAULTS = [
    Fault(
        "the last row of padding is seen",
        "caches.batch_masks",
        "return mx.arange(slots) >= _column(padding)",
        "return mx.arange(slots) >= _column(padding) - 1",
        (("mlx_h2o.caches.batch_padding", "decode_mask"),),
        sequences_of_a_batch,
    ),
    Fault(
        "the sequences of a batch share one clock",
        "caches.batched",
        "behind = [clock - line.tokens for line in self._lines]",
        "behind = [0 for line in self._lines]",
        (("BatchedRows", "_replace"),),
        sequences_of_a_batch,
    ),
    Fault(
        "the last queries of a batch count, whosever they are",
        "caches.batched",
        "return all(span == (0, self._length) for span in self._spans)",
        "return True",
        (("BatchedRows", "_regular"),),
        long_prompts_of_a_batch,
    ),
    Fault(
        "padding on the right stays where it is",
        "caches.batched",
        "ends = [before + stop for _, stop in spans]",
        "ends = [store.length for _, stop in spans]",
        (("BatchedRows", "_settle"),),
        sequences_of_a_batch,
    ),
    Fault(
        "what is committed depends on what comes",
        "caches.provisional",
        "frontier = max(self._frontier, self.offset - self._reach)",
        "frontier = min(self.offset, self.offset + keys.shape[2] - self._reach)",
        (("ProvisionalRows", "_advance"),),
        rewound_drafts,
    ),
    Fault(
        "rows that were moved stay where they went",
        "caches.rewinding",
        "store.assign(self.start, moved)",
        "pass",
        (("Overwritten", "undo"),),
        rewound_drafts,
    ),
    Fault(
        "rows that went do not come back",
        "caches.rewinding",
        "moved = store.exchange(self.slots, self.rows)",
        "return",
        (("Overwritten", "undo"),),
        rewound_drafts,
    ),
    Fault(
        "rows move and what is said of them does not",
        "caches.provisional",
        "if source is not None:",
        "if False:",
        (("ProvisionalRows", "_write_over"),),
        rewound_drafts,
    ),
    Fault(
        "one row too few moves",
        "caches.rewinding",
        "start = length - count",
        "start = length - max(1, count - 1)",
        (("mlx_h2o.caches.provisional", "overwrite"),),
        steps_in_place,
    ),
    Fault(
        "provisional rows may go",
        "caches.provisional",
        "_replace(offset=offset, before=offset)",
        "_replace(offset=offset)",
        (("ProvisionalRows", "_worst"),),
        drafts_without_a_window,
    ),
    Fault(
        "the scores of rejected queries stay",
        "caches.speculation",
        "parts = [aside.part(0, target) for aside in self._asides]",
        "parts = [aside.part(0, self.offset + n) for aside in self._asides]",
        (("SpeculativeRows", "trim"),),
        rewound_drafts,
    ),
    Fault(
        "evictions of a rejected draft are not undone",
        "caches.speculation",
        "while self._log and self._log[-1].offset >= target:",
        "while False:",
        (("SpeculativeRows", "trim"),),
        rewound_drafts,
    ),
    Fault(
        "what goes with the rows of a batch is not moved",
        "caches.batch_rows",
        "found.companions = tuple(function(array) for array in store.companions)",
        "found.companions = store.companions",
        (("mlx_h2o.caches.batch_rows", "mapped"), ("mlx_h2o.caches.batch", "mapped")),
        sequences_that_come_and_go,
    ),
    Fault(
        "what goes with rows that are gathered is not",
        "stores.storage",
        "self.companions = tuple(gathered(array, slots) for array in self.companions)",
        "self.companions = tuple(a[:, :, : slots.shape[2]] for a in self.companions)",
        (("Storage", "_keep_remembered"),),
        sequences_that_come_and_go,
    ),
    Fault(
        "what goes with drafted rows stays where they were",
        "stores.storage",
        "request = RowExchange([*arrays, *self.companions], slots, rows, start)",
        "request = RowExchange(arrays, slots, rows and rows[: len(arrays)], start)\n"
        "        exchange_rows(request)\n"
        "        found, old = exchange_rows(request)\n"
        "        self._rebind(found)\n"
        "        return [*old, *(a[:, :, : slots.shape[2]] for a in self.companions)]",
        (("Storage", "exchange"),),
        linked_drafts,
    ),
    Fault(
        "caches that evict for good may be drafted on",
        "lm.drafting",
        "if allowed < drafted:",
        "if allowed < 0:",
        (("mlx_h2o.lm.drafting", "_check"),),
        drafts_of_a_model,
    ),
    Fault(
        "a file may be shorter than it says",
        "lm.safetensors",
        "if size != expected:",
        "if size > expected:",
        (("mlx_h2o.lm.saving", "read_header"),),
        truncated_files,
    ),
    Fault(
        "a cache is saved in its place",
        "lm.saving",
        'beside = os.path.join(folder, f".{name}.{uuid.uuid4().hex}{_SUFFIX}")',
        "beside = path",
        (("test_contract_faults", "save_prompt_cache"),),
        interrupted_saves,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_suite_catches(fault, monkeypatch):
    with monkeypatch.context() as patch:
        put_in_place(fault, patch, seeded=False)
        fault.check()
    with monkeypatch.context() as patch:
        put_in_place(fault, patch, seeded=True)
        with pytest.raises((AssertionError, ValueError)) as caught:
            fault.check()
    print(f"{fault.what}: {caught.value!r:.120}")
    fault.check()

"""All arms on all jobs: measured once each, kept in a file as they come, taken up again from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..evaluate import _routed
from ..lm.fingerprint import fingerprint
from ..lm.prompt_cache import beyond_context
from ..lm.routing import context_length
from .arms import Arm, Footprint, resolve, with_controls
from .documents import Document, counted, windows
from .environment import blas, environment
from .facts import Tokenizer
from .held import Recorder, pieces
from .strategies import Strategy
from .tasks import Job, Settings, jobs

__all__ = ["Evaluation", "Watch", "evaluate"]

Watch = Callable[[str, int, int], None]
"""Called with (what is measured, measurements done, measurements in all)."""

REFERENCE_BYTES = 2**29
"""What the full cache's predictions may take, which others are compared with."""

MOST_SIDE_BY_SIDE = 16

MEASUREMENTS = "measurements.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """What was measured, of what.

    setting: model, text, documents, settings and environment, all that a measurement depends on.
    arms: in the order of tables.
    records: one per job and arm: `case`, `documents`, `seed`, `strategy`, and `figures`, or
        `error` where it failed; and `held`, what :mod:`.held` recorded, where it did.
    notes: what a reader must know beside the figures.
    texts: by task the text that was recorded: its `pieces`, one per token, and the `facts` in it.
    """

    setting: dict[str, Any]
    arms: tuple[Arm, ...]
    records: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    texts: dict[str, dict[str, list[str]]]


def evaluate(
    model: Any,
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, str]],
    strategies: Sequence[Strategy],
    *,
    model_name: str = "",
    tasks: Sequence[str] = ("ppl",),
    settings: Settings | None = None,
    controls: bool = True,
    record: bool = True,
    folder: Path | None = None,
    watch: Watch | None = None,
) -> Evaluation:
    """Measure the strategies, and beside them what they must be compared with.

    Args:
        model: an mlx_lm model.
        tokenizer: its tokenizer.
        texts: name and text of each; documents are cut out of them.
        strategies: see :mod:`mlx_h2o.evaluation.strategies`.
        model_name: how the results call the model.
        tasks: "ppl", with divergence and agreement, "needle", and "skips", of sparse V.
        settings: of the tasks.
        controls: whether to add the full cache, mlx_lm's quantised ones, and a rotating window
            and a random choice of the same bytes.
        record: whether to note, of the first document of each task, its text and which positions
            the strategies' caches hold.
        folder: where measurements are kept, and taken from where they are there already.
        watch: is told what goes on.

    Raises:
        ValueError: texts that are too short, a strategy that cannot be, a folder with measurements
            of something else.
    """
    settings = settings or Settings()
    longest = max(settings.lengths or (settings.length,))
    documents = windows(tokenizer, texts, count=settings.documents, length=longest)
    _check_lengths(documents, settings)
    tokens = max(len(document.tokens) for document in documents)
    footprint = Footprint(model)
    arms = _unique([resolve(footprint, strategy, tokens) for strategy in strategies])
    missing: list[str] = []
    if controls:
        arms, missing = with_controls(footprint, arms, tokens)
    groups = _groups(len(documents), settings.batch, tokens * footprint.vocabulary)
    setting = {
        "model": model_name,
        "fingerprint": fingerprint(model),
        "text_hash": hashlib.sha256("".join(text for _, text in texts).encode()).hexdigest(),
        "documents": [
            {"source": one.source, "start": one.start, "tokens": len(one.tokens), "hash": one.hash}
            for one in documents
        ],
        "settings": json.loads(json.dumps(asdict(settings))),
        "side_by_side": len(groups[0]),
        "environment": {**environment(), "blas": blas()},
    }
    store = _Store(folder, setting)
    planned = jobs(model, tokenizer, documents, groups, tasks, settings)
    work, texts_read = _planned(planned, arms, tokenizer if record else None)
    records = _measured(model, work, store, watch)
    notes = [*_notes(documents, arms, settings), *(f"Left out: {text}." for text in missing)]
    if beyond := beyond_context(context_length(model), tokens):
        notes.append(beyond)
    return Evaluation(setting, tuple(arms), tuple(records), tuple(notes), texts_read)


def _check_lengths(documents: Sequence[Document], settings: Settings) -> None:
    """Raises ValueError unless they are long enough."""
    tokens = len(documents[0].tokens)
    if tokens < settings.prompt + 2:
        raise ValueError(
            f"{documents[0].source} has {tokens} tokens, expected at least "
            f"{settings.prompt + 2}: nothing would be predicted"
        )
    longest = max(settings.lengths, default=0)
    if tokens < longest:
        raise ValueError(f"{documents[0].source} has {tokens} tokens, expected {longest} (lengths)")


def _unique(arms: Sequence[Arm]) -> list[Arm]:
    """Each once. Raises ValueError where files of the same name make two look alike."""
    found: dict[str, Arm] = {}
    for arm in arms:
        other = found.setdefault(arm.name, arm).strategy
        if other.budgets != arm.strategy.budgets:
            raise ValueError(f"two strategies are called {arm.name}, expected files of two names")
    return list(found.values())


def _groups(documents: int, batch: int | None, logits: int) -> list[tuple[int, ...]]:
    """Which documents are read side by side, by index."""
    size = batch or max(1, min(MOST_SIDE_BY_SIDE, REFERENCE_BYTES // (2 * logits)))
    return [
        tuple(range(start, min(start + size, documents))) for start in range(0, documents, size)
    ]


_Work = tuple[Job, Arm, bool]
"""What to measure, and whether it is recorded."""


def _planned(
    planned: Iterator[Job], arms: Sequence[Arm], tokenizer: Tokenizer | None
) -> tuple[list[_Work], dict[str, dict[str, list[str]]]]:
    """All measurements, and by task the text that is recorded; without a tokenizer none is."""
    work: list[_Work] = []
    shown: dict[str, dict[str, list[str]]] = {}
    for job in planned:
        task = job.case["task"]
        recorded = tokenizer is not None and bool(job.text) and task not in shown
        if tokenizer is not None and recorded:
            shown[task] = {"pieces": pieces(tokenizer, job.text), "facts": list(job.facts)}
        measured = (arm for arm in arms if job.every_seed or arm.strategy.seeded)
        work += [(job, arm, recorded) for arm in measured]
    return work, shown


def _measured(
    model: Any, work: list[_Work], store: _Store, watch: Watch | None
) -> list[dict[str, Any]]:
    """Measure all of these, and leave none of them."""
    records: list[dict[str, Any]] = []
    total = len(work)
    work.reverse()
    while work:  # what a job has read goes with its last measurement
        job, arm, record = work.pop()
        key = {
            "case": job.case,
            "documents": list(job.documents),
            "seed": job.seed,
            "strategy": arm.name,
        }
        found = store.known(key)
        if found is None:
            said = f"{arm.name}: {job.case['task']}"
            if watch is not None:
                watch(said, len(records), total)
            found = {**key, **_figures(model, job, arm, record)}
            store.add(found)
        records.append(found)
    if watch is not None:
        watch("done", total, total)
    return records


def _figures(model: Any, job: Job, arm: Arm, record: bool) -> dict[str, Any]:
    """The figures, or what went wrong: a failure is a result too."""
    asked = arm.evicts and not arm.control and arm.strategy.kind == "ours"
    recorder = Recorder(len(job.text)) if record and asked else None
    try:
        with _routed(model, arm.make(job.seed)):
            figures = job.measure(lambda: arm.make(job.seed), recorder)
        return {"figures": figures} | ({} if recorder is None else {"held": recorder.found()})
    except (ValueError, RuntimeError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


class _Store:
    """Measurements that a folder keeps, one JSON object a line, behind one of their setting."""

    def __init__(self, folder: Path | None, setting: Mapping[str, Any]) -> None:
        self._path = None if folder is None else folder / MEASUREMENTS
        self._known: dict[str, dict[str, Any]] = {}
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        found = [one for one in map(_parsed, lines) if one is not None]
        if found:
            self._check(found[0], setting)
        self._known = {_key(one): one for one in found[1:] if "error" not in one}
        # Written anew: the last line may have been cut short, and failures are tried again.
        kept = [setting, *self._known.values()]
        self._path.write_text("".join(map(_line, kept)), encoding="utf-8")

    def _check(self, found: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        for name, value in setting.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{self._path} holds measurements of another {name.replace('_', ' ')}, "
                    "expected the same, or another folder"
                )

    def known(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._known.get(_key(key))

    def add(self, record: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(record))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _key(record: Mapping[str, Any]) -> str:
    names = ("case", "documents", "seed", "strategy")
    return json.dumps([record.get(name) for name in names], sort_keys=True)


def _notes(documents: Sequence[Document], arms: Sequence[Arm], settings: Settings) -> list[str]:
    lengths = settings.lengths or (len(documents[0].tokens),)
    tokens = ", ".join(map(str, lengths)) + " tokens" + (", averaged" if len(lengths) > 1 else "")
    notes = [
        f"{counted(len(documents), 'document')} of {tokens}, {counted(settings.seeds, 'seed')}. "
        "Bytes are those of all layers, with 16 bits per unquantised element, and scales, scores "
        "and positions."
    ]
    if len(documents) < settings.documents:
        notes.append(
            f"The text is only long enough for {len(documents)} of {settings.documents} documents."
        )
    if len(documents) < 8:
        notes.append("Intervals over so few documents are too narrow.")
    if len({document.source for document in documents}) < len(documents):
        notes.append("Documents of one text are not independent.")
    whole = [arm.name for arm in arms if arm.rows is not None and not arm.evicts]
    if whole:
        notes.append(f"Nothing was evicted by {', '.join(whole)}: the documents fit.")
    return notes

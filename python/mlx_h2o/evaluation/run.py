"""Measure every arm on every case once, and keep the results in a file, to resume from."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from ..lm.files import write_text
from ..lm.models import fingerprint
from ..lm.routing import context_length
from .arms import ARMS, DEFAULT, REFUSALS, Arm, Sizes
from .environment import environment
from .questions import Settings
from .reading import Progress
from .report import Result, table
from .tasks import Case, cases

TaskProgress = Callable[[str, int, int], None]
"""Called with (what is measured, its steps done, its steps in all): 0, 0 while caches are sized."""

SHARES = (Fraction(1, 4), Fraction(1, 8))


def evaluate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[tuple[str, str]],
    arms: Sequence[Arm] = DEFAULT,
    *,
    model_name: str = "",
    tasks: Sequence[str] = ("loss",),
    shares: Sequence[Fraction] = SHARES,
    settings: Settings | None = None,
    file: Path | None = None,
    watch: TaskProgress = lambda said, done, total: None,
    sizes: Sizes | None = None,
) -> Result:
    """Measure every arm of every task, at shares of the bytes that the full cache takes.

    Args:
        model: an mlx_lm model.
        tokenizer: its tokenizer.
        texts: name and text of each; windows are cut out of them.
        arms: see :mod:`mlx_h2o.evaluation.arms`.
        model_name: how the result calls the model.
        tasks: of TASKS.
        shares: of the bytes of the full cache, with 16 bits an element, at the text's length.
        settings: of the tasks.
        file: keeps the result, and a run that was interrupted resumes from it.
        watch: called with the progress.
        sizes: the sizes of the arms' caches, if they are known.

    Returns:
        The content of the file: `model`, `texts`, `settings`, `environment`, hashes and settings
        that identify the model, the file of RULER and the caller's own arms, and `records`. A
        record has `task`, `tokens`, `share` (None if the arm has its own size), `arm`, and either
        `bytes` and `figures` (by measure, one for each text or question), or `refused`: why there
        are none.

    Raises:
        ValueError: texts that are too short, several arms of one name, or a file with results of
            something else.
    """
    if len({arm.name for arm in arms}) < len(arms):
        found = ", ".join(arm.name for arm in arms)
        raise ValueError(f"arms have the names {found}, expected each once")
    settings = settings or Settings()
    what: dict[str, Any] = {
        "model": model_name,
        "context": context_length(model),
        "texts": [
            {"name": name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in texts
        ],
        "settings": _said(settings),
        "environment": environment(),
        "fingerprint": fingerprint(model),
        "ruler": settings.ruler and hashlib.sha256(Path(settings.ruler).read_bytes()).hexdigest(),
        "arm": _plain({arm.name: dict(arm.settings) for arm in arms if ARMS.get(arm.name) != arm}),
    }
    result: Result = {**what, "records": _known(file, what)}
    _turn(model)
    sizes = sizes or Sizes(model, settings.seed)
    # Arms with their own size are measured once.
    pairs: list[tuple[Arm, Fraction | None]] = [(arm, None) for arm in arms if not arm.sized]
    pairs += [(arm, share) for share in shares for arm in arms if arm.sized]
    for case in [*cases(model, tokenizer, texts, tasks, settings)]:  # or a refusal comes late
        whole = sizes.full(case.tokens)
        for arm, share in pairs:
            part = None if share is None else str(share)
            key = {"task": case.task, "tokens": case.tokens, "share": part, "arm": arm.name}
            if any(key.items() <= record.items() for record in result["records"]):
                continue
            nbytes = whole if share is None else int(whole * share)
            at = f" at {part}" if part else ""
            progress = partial(watch, f"{case.task} {case.tokens}, {arm.name}{at}")
            result["records"].append(key | _measured(sizes, case, arm, nbytes, progress))
            if file is not None:
                write_text(file, json.dumps(result, indent=1) + "\n")
    return result


def _said(settings: Settings) -> dict[str, Any]:
    return _plain(asdict(settings) | {"ruler": settings.ruler and Path(settings.ruler).name})


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """The same after a round trip through JSON."""
    return cast(dict[str, Any], json.loads(json.dumps(found, default=repr)))


def _turn(model: Any) -> None:
    """Transpose the layout of weights on a CPU, whose BLAS then multiplies few rows a third faster;
    their values do not change."""
    if mx.default_device().type == mx.DeviceType.cpu:
        for module in model.modules():
            if type(module) in (Linear, Embedding):
                module.weight = mx.contiguous(module.weight.T).T
                mx.eval(module.weight)


def _measured(
    sizes: Sizes, case: Case, arm: Arm, nbytes: int, progress: Progress
) -> dict[str, Any]:
    """Bytes and figures, or the error: a refusal is a result too."""
    try:
        progress(0, 0)
        made = sizes.made(arm, case.tokens, nbytes)
        if arm.kind == "full" and case.full is not None:
            return {"bytes": made.nbytes, "figures": case.full()}
        return {"bytes": made.nbytes, "figures": case.measure(made.make, progress)}
    except REFUSALS as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _known(file: Path | None, what: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of a file with the same settings; refusals are dropped, to be tried again."""
    text = file.read_bytes() if file is not None and file.is_file() else b""
    if not text.strip():
        return []
    try:
        found = json.loads(text)
        records = [record for record in found["records"] if "figures" in record]
        # Raises if a record has not what the table of all of them will show.
        _ = table({"records": records}), sum(one["bytes"] + one["tokens"] for one in records)
        own = {"lengths": what["settings"]["lengths"]}  # records say theirs
        found["settings"] = {**_said(Settings()), **found["settings"], **own}
        # Fields that earlier versions did not write count as equal; arms may differ.
        known = found.get("arm", {})
        found = {name: what[name] for name in ("fingerprint", "ruler")} | found
        found["arm"], what["arm"] = what["arm"] | known, known | what["arm"]
    except Exception as error:  # people may have edited anything in it
        raise ValueError(f"{file} is not a result of evaluate, expected one, or no file") from error
    for name in ("model", "texts", "settings", "environment", "fingerprint", "ruler", "arm"):
        if found.get(name) != what[name]:
            said = f"{file} holds measurements of another {name}"
            raise ValueError(f"{said}, expected the same, or another file")
    return records

"""What the caches lose on real models at equal bytes: `mlx_h2o evaluate` with all arms and tasks.

    python benchmarks/real_models.py smollm2-135m-instruct --texts BOOK.txt ... --ruler FILE.jsonl
    python benchmarks/real_models.py gemma3-270m --texts BOOK.txt ... --tasks loss facts

`nox -s yardsticks` makes the models, in MLX_H2O_MODELS or ~/.cache/mlx-h2o/models. Give texts that
nothing was chosen on. With OpenBLAS (LD_PRELOAD) an arm of four texts of 768 tokens takes about a
minute. What the result file has already is not measured again, so that a run may be interrupted and
split by tasks, arms and bytes. `python tools/tables.py` writes the tables of the pages, `--plot`
draws the loss against bytes.
"""

from __future__ import annotations

import argparse
import os
from fractions import Fraction
from pathlib import Path

import mlx_h2o
from mlx_h2o.commands.evaluate import Watch
from mlx_h2o.evaluation import report
from mlx_h2o.evaluation.arms import ARMS, parsed
from mlx_h2o.evaluation.run import evaluate
from mlx_h2o.evaluation.settings import Settings
from mlx_h2o.evaluation.tasks import TASKS

RESULTS = Path(__file__).parent / "results"
MODELS = Path(os.environ.get("MLX_H2O_MODELS", Path.home() / ".cache" / "mlx-h2o" / "models"))
DRAWN = ("full", "window", "kv8", "keydiff", "random", "h2o-ema", "ours")
SHARES = ("1/2", "1/4", "1/8", "1/16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help=f"a folder of {MODELS}")
    parser.add_argument("--texts", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--ruler", metavar="FILE")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--arms", nargs="+", default=tuple(ARMS))
    parser.add_argument("--bytes", nargs="+", type=Fraction, default=[*map(Fraction, SHARES)])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--step", type=int, default=Settings.step)
    parser.add_argument("--lengths", nargs="+", type=int, default=Settings.lengths)
    parser.add_argument("--json", type=Path, help="the result file")
    parser.add_argument("--plot", type=Path, help="the loss of DRAWN against bytes, as .svg")
    args = parser.parse_args()
    if "ruler" in args.tasks and args.ruler is None:
        parser.error("the task ruler needs --ruler FILE")
    if not (MODELS / args.model).is_dir():
        parser.error(f"{MODELS / args.model} does not exist: nox -s yardsticks makes it")
    model, tokenizer = mlx_h2o.load(str(MODELS / args.model))
    result = evaluate(
        model,
        tokenizer,
        [(file.name, file.read_text(encoding="utf-8")) for file in args.texts],
        [parsed(arm) for arm in args.arms],
        model_name=args.model,
        tasks=args.tasks,
        shares=args.bytes,
        settings=Settings(
            documents=args.documents, step=args.step, lengths=tuple(args.lengths), ruler=args.ruler
        ),
        file=args.json or RESULTS / f"real_{args.model}.json",
        watch=Watch(),
    )
    if args.plot:
        drawn = [one for one in result["records"] if one["arm"] in DRAWN]
        report.plot({**result, "records": drawn}, args.plot)


if __name__ == "__main__":
    main()

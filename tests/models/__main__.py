"""``python -m models``: our caches on every architecture of mlx_lm, the table of docs/models.md.

Each runs in its own process. Writes the table with ``--write``; otherwise fails if the committed
one differs. Always fails if a promise is broken.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import sys

from tqdm import tqdm

from programs import ended

from . import tiny
from .check import Verdict
from .table import END, PAGE, START, broken, table

_TIMEOUT = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("names", nargs="*", help="only these; the page is left alone")
    arguments = parser.parse_args()
    names = arguments.names or tiny.architectures()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = list(tqdm(pool.map(_verdict, names), total=len(names), disable=None))
    found = table(verdicts, importlib.metadata.version("mlx-lm"))
    print(found)
    faults = broken(verdicts)
    for fault in faults:
        print(f"BROKEN {fault}", file=sys.stderr)
    if arguments.names:
        return bool(faults)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    committed, _, after = rest.partition(END)
    if arguments.write:
        PAGE.write_text(f"{before}{START}\n{found}\n{END}{after}", encoding="utf-8")
    elif committed.strip() != found:
        print("docs/models.md differs: python -m models --write", file=sys.stderr)
        return 1
    return bool(faults)


def _verdict(name: str) -> Verdict:
    """In a process of its own: one model's crash or memory is not another's."""
    done = ended(sys.executable, "-m", "models.check", name, timeout=_TIMEOUT)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Verdict(name, h2o=f"broken: {last[0]}")
    return Verdict(**json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())

"""The table on the terminal, and the same table as JSON."""

import json
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from golden.build import Case
from parity.outcome import Verdict


@dataclass
class Report:
    """Verdicts by leg and case, versions of the legs that ran, reasons of those that did not.

    ``absent`` has the reasons, by leg and case, where a leg has no such operation: no verdict.
    """

    cases: list[Case]
    verdicts: dict[str, dict[str, Verdict]] = field(default_factory=dict)
    absent: dict[str, dict[str, str]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def _cells(self) -> Iterator[tuple[str, Verdict]]:
        for leg, column in self.verdicts.items():
            yield from ((f"{name} ({leg}): ", verdict) for name, verdict in column.items())

    def failures(self) -> list[str]:
        """ "case (leg): reason" of every cell that failed."""
        failed = ((cell, one.cell, one.note) for cell, one in self._cells() if not one.ok)
        return [cell + said + (note and f", {note}") for cell, said, note in failed]

    def remarks(self) -> list[str]:
        """Notes on cells that passed, refusals apart: where traces parted at equal candidates."""
        passed = ((cell, one) for cell, one in self._cells() if one.ok and one.cell != "refused")
        return [cell + one.note for cell, one in passed if one.note]

    def print(self, console: Console) -> None:
        legs = [*self.verdicts, *self.not_run]
        table = Table(title="parity: worst error / tolerance", pad_edge=False)
        table.add_column("case")
        for leg in legs:
            table.add_column(leg, justify="right")
        for case in self.cases:
            cells = []
            for leg in legs:
                verdict = self.verdicts.get(leg, {}).get(case.name)
                missing = "n/a" if case.name in self.absent.get(leg, {}) else "-"
                text = missing if verdict is None else verdict.cell
                cells.append(text if verdict is None or verdict.ok else f"[bold red]{text}[/]")
            table.add_row(case.name, *cells)
        console.print(table)
        refused = {
            (leg, verdict.note)
            for leg, column in self.verdicts.items()
            for verdict in column.values()
            if verdict.ok and verdict.cell == "refused"
        }
        for leg, reason in sorted(refused):
            console.print(f"{leg} refused: {reason}", style="dim", highlight=False)
        for leg, absent in self.absent.items():
            for reason, count in Counter(absent.values()).items():
                text = f"{leg}: {count} cases n/a: {reason}"
                console.print(text, style="yellow", highlight=False)
        for line in self.remarks():
            console.print(f"~ {line}", highlight=False)
        for leg, reason in self.not_run.items():
            console.print(f"{leg}: not run: {reason}", style="yellow", highlight=False)
        for line in self.failures():
            console.print(f"FAILED {line}", style="bold red", highlight=False, markup=False)

    def write(self, path: Path) -> None:
        found = {
            "machine": {
                name: getattr(platform, name)() for name in ("system", "machine", "release")
            },
            "legs": {
                leg: {"versions": self.versions.get(leg, {}), "not_run": self.not_run.get(leg, "")}
                for leg in (*self.verdicts, *self.not_run)
            },
            "cases": {
                case.name: {
                    leg: column[case.name].as_json()
                    if case.name in column
                    else {"cell": "n/a", "note": self.absent[leg][case.name]}
                    for leg, column in self.verdicts.items()
                }
                for case in self.cases
            },
            "failures": self.failures(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")

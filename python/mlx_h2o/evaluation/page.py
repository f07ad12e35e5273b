"""A result as one HTML page, without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from typing import Any

from .documents import counted
from .front import fronts
from .tables import Result, Table, divisions, notes, table

__all__ = ["page"]


def page(result: Result) -> str:
    """The front, the tables, which positions were held, and what all of it depends on."""
    title = escape(f"{result['model'] or 'A model'}: what bounded caches cost")
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="quiet">{escape(_in_short(result))}</p>',
        "<h2>Quality against bytes</h2>",
        fronts(result),
        "<h2>Strategies</h2>",
        _table(_by_bytes(result)),
        _list(notes(result)),
        *(
            f"<details open><summary>{escape(said)}</summary>{_table(rows)}</details>"
            for said, rows in divisions(result).items()
        ),
        *_held(result),
        "<h2>Settings</h2>",
        _settings(result),
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_file('page.css')}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _in_short(result: Result) -> str:
    documents = result["documents"]
    sources = ", ".join(dict.fromkeys(one["source"] for one in documents))
    of = f"of {documents[0]['tokens']} tokens from {sources}"
    return f"{counted(len(documents), 'document')} {of}"


def _by_bytes(result: Result) -> Table:
    """The table, the most bytes first."""
    head, *rows = table(result)
    arms = zip(result["strategies"], rows, strict=True)
    return [head, *(row for _, row in sorted(arms, key=lambda one: -one[0]["bytes"]))]


def _table(rows: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        f"<tr{' class=control' if row[0].endswith('(control)') else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows[1:]
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _list(lines: Iterable[str]) -> str:
    return f'<ul class="quiet">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def _held(result: Result) -> list[str]:
    recorded = result.get("recorded")
    if not recorded:
        return ['<p class="quiet">Which positions were held was not recorded.</p>']
    data = json.dumps(recorded, ensure_ascii=False).replace("<", "\\u003c")
    shares = "".join(f"<span><i class=square></i>{text}</span>" for text in _SHARES)
    counts = "".join(f"<span><i class=square></i>{text}</span>" for text in _COUNTS)
    return [
        "<h2>Which positions are held</h2>",
        "<p>In the first document. Tokens read run from left to right, positions in the text from "
        "top to bottom; evicted positions turn white. Click a map to choose its layer.</p>",
        '<p class="choices"><label>Read <select id="task"></select></label> '
        '<label>Strategy <select id="strategy"></select></label></p>',
        f'<p class="legend sharing">Held by {shares}</p>',
        f'<p class="legend folding">A row stands for {counts}</p>',
        '<div id="maps"></div>',
        "<h2>What is left of the text</h2>",
        '<p class="choices"><label>Layer <select id="layer"></select></label>'
        '<span class="quiet" id="left"></span></p>',
        '<div id="text"></div>',
        '<p class="quiet">Planted facts are underlined.</p>',
        f'<script type="application/json" id="recorded">{data}</script>',
        f"<script>{_file('page.js')}</script>",
    ]


_SHARES = ("no head", "a third of the heads", "two thirds", "all heads")
_COUNTS = ("1 token", "2", "4", "8", "16", "32", "64 and more")


def _settings(result: Result) -> str:
    hashes = {
        name.replace("_", " "): result[name]
        for name in ("fingerprint", "model_hash", "text_hash")
        if name in result
    }
    lines = {
        "command": f"<code>{escape(result['command'])}</code>",
        **_lines(hashes),
        **_lines(result["settings"]),
        "read side by side": str(result["side_by_side"]),
        **_lines(result["environment"]),
    }
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{said}</td></tr>" for name, said in lines.items()
    )
    return f'<div class="wide"><table class="settings">{rows}</table></div>'


def _lines(of: Mapping[str, Any]) -> dict[str, str]:
    """Names and values, lists with spaces; what is not set is left out."""
    found = {}
    for name, value in of.items():
        said = " ".join(map(str, value)) if isinstance(value, list) else value
        if said not in (None, ""):
            found[name] = escape(str(said))
    return found

"""Hooks of mkdocs.yml: for the site, do what GitHub does with the documents by itself."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

_LINK = re.compile(r"\]\((?!https?:)([^)#]+)((?:#[^)]*)?)\)")
_ROLE = re.compile(r":(?:class|func|meth|mod):(?=<code>)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Let links to files outside of docs/, such as results, lead to copies in the site."""
    source = Path(page.file.abs_src_path)

    def lead(found: re.Match[str]) -> str:
        target = (source.parent / found[1]).resolve()
        if target.is_relative_to(config.docs_dir) or not target.is_file():
            return found[0]  # mkdocs reports what is wrong with it, if anything
        copy = f"repository/{target.relative_to(ROOT).as_posix()}"
        if target.suffix == ".md":  # else mkdocs would take it for a page, too late
            copy += ".txt"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(target)))
        return f"]({os.path.relpath(copy, os.path.dirname(page.file.src_uri))}{found[2]})"

    return _LINK.sub(lead, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Turn the Sphinx roles of docstrings into plain names."""
    return _ROLE.sub("", html)

"""The public C headers as declarations that cffi can read."""

import re

from paths import ROOT

INCLUDE = (ROOT / "mlx-c" / "include", ROOT / "mlx-c" / "h2o" / "include")
HEADER = "mlx_h2o/c/h2o.h"


def declarations(header: str = HEADER) -> str:
    """The declarations of a public header and everything it includes, for cffi."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        found = next((d / name for d in INCLUDE if (d / name).is_file()), None)
        if name in seen or found is None:
            return ""
        seen.add(name)
        text = re.sub(r"#ifdef __cplusplus.*?#endif", "", found.read_text(), flags=re.DOTALL)
        included = re.findall(r'^#include "(.+)"', text, flags=re.MULTILINE)
        return "".join(map(expand, included)) + re.sub(r"^#.*$", "", text, flags=re.MULTILINE)

    return expand(header)


def functions() -> list[str]:
    """The names of the functions that the headers declare."""
    return re.findall(r"\b(_?mlx_\w+)\(", re.sub(r"/\*.*?\*/", "", declarations(), flags=re.DOTALL))

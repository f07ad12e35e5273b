"""Requests made from the server's OpenAPI schema: is one answered with a 5xx, or not at all?

    nox -s schemathesis -- 1800 --json benchmarks/results/from_schema.json

schemathesis makes requests that the schema allows, and others that it does not. ``map_body`` sets
the model and the lengths of some of them to possible values, so that the server answers them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from soak import server

from lib import common

CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"
MOST = {"max_tokens": 12, "max_completion_tokens": 12, "n": 4, "top_k": 100, "top_logprobs": 20}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """The body with a model that the server has, and with a limit on answers."""
    if not isinstance(body, dict):
        return body
    found = dict(body)
    if isinstance(found.get("model"), str):
        found["model"] = "demo"
    for name, most in MOST.items():
        if isinstance(found.get(name), int | float):
            found[name] = min(found[name], most)
    if isinstance(found.get("logit_bias"), dict):
        found["logit_bias"] = dict(zip("56", found["logit_bias"].values(), strict=False))
    if isinstance(prompt := found.get("prompt"), list):
        found["prompt"] = [one % 4096 if type(one) is int else one for one in prompt]
    return found


def main() -> None:
    args = common.arguments(__doc__, "seconds", seconds=60)
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        with server(Path(name), "--max-tokens", "12") as (client, _):
            root = str(client.base_url).removesuffix("/v1/")
            folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            status = subprocess.run(
                [
                    Path(sys.executable).with_name("schemathesis"), "--no-color",
                    "run", f"{root}/openapi.json", "--checks", CHECKS, "--continue-on-failure",
                    "--max-time", str(args.seconds), "--request-timeout", "120", "--workers", "2",
                    "--report", "json", "--report-json-path", report,
                ],
                cwd=name, env=os.environ | {
                    "SCHEMATHESIS_HOOKS": Path(__file__).stem, "PYTHONPATH": ":".join(folders)
                },
            ).returncode  # fmt: skip
            lines = httpx.get(f"{root}/metrics").text.splitlines()
            counts = dict(line.rsplit(" ", 1) for line in lines if line.startswith("mlx_h2o_"))
            health = httpx.get(f"{root}/health").status_code
        said = json.loads(report.read_text())
        log = (Path(name) / "log").read_text()
    result = {
        "seconds": round(said["running_time"]),
        "schemathesis": said["schemathesis_version"],
        "checks": CHECKS.split(","),
        "cases": said["test_cases"]["generated"],
        "failures": said["failures"],
        "errors": said["errors"],
        "answers": {
            name: int(float(counts[f"mlx_h2o_{name}_total"]))
            for name in ("finished", "failed", "left", "answered")
        },
        "tracebacks_in_the_log": log.count("Traceback"),
        "health_at_the_end": health,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    common.save(args.json, result)
    if status or health != 200 or result["tracebacks_in_the_log"]:
        raise SystemExit(f"see above, and the server's log: {log[-5000:]}")


if __name__ == "__main__":
    main()

"""A small language model and a text that come with the package: `python -m mlx_h2o.demo`.

The model (see `model/MODEL_CARD.md`) writes English of the 19th century and recalls facts planted
in one fixed wording. It is there to show and to test eviction where nothing can be downloaded, not
to be talked to.
"""

from pathlib import Path

__all__ = ["DEMO", "model_path", "text"]

DEMO = "demo"
"""What names the model where a path may stand."""

_HERE = Path(__file__).parent


def model_path() -> Path:
    """The directory of the demo model, in mlx-lm's format.

    The weights are float16: on a CPU use them in float32.
    """
    return _HERE / "model"


def text() -> str:
    """Letter 1 of Mary Shelley's "Frankenstein" (1818, public domain), which was not trained on."""
    return (_HERE / "text" / "frankenstein.txt").read_text(encoding="utf-8")

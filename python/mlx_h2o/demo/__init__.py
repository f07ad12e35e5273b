"""A small language model and a text that come with the package: `python -m mlx_h2o.demo`.

The model (see `model/MODEL_CARD.md`) writes English of the 19th century and recalls facts planted
in one fixed wording. It serves to show and test eviction where nothing can be downloaded; it is not
made for conversation.
"""

from pathlib import Path

__all__ = ["DEMO", "model_path", "text"]

DEMO = "demo"
"""The name of the model, which can stand in place of a path."""

_HERE = Path(__file__).parent


def model_path() -> Path:
    """The directory of the demo model, in mlx-lm's format.

    The weights are float16: on a CPU use them in float32.
    """
    return _HERE / "model"


def text() -> str:
    """Letter 1 of Mary Shelley's "Frankenstein" (1818, public domain), not in the training data."""
    return (_HERE / "text" / "frankenstein.txt").read_text(encoding="utf-8")

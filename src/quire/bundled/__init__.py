"""The tiny demonstration model that `quire` runs when no model is named."""

from __future__ import annotations

from pathlib import Path

__all__ = ["bundled_model_path"]


def bundled_model_path() -> Path:
    """The folder of the bundled model, in the layout of a Hugging Face model folder."""
    return Path(__file__).resolve().parent

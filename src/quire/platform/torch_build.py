"""For which devices the installed torch was built, by its files: importing it takes seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = ["TorchBuild", "find_torch_build"]

_LINE = r"^{name}\s*(?::[^=]*)?=\s*['\"](.+?)['\"]"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """version: "2.11.0+cu128", empty if there is none. cuda, hip: versions of the runtimes that it
    was built for, None if it was not."""

    version: str
    cuda: tuple[int, int] | None
    hip: tuple[int, int] | None


def find_torch_build(folder: Path | None = None) -> TorchBuild:
    """folder: of the package; the installed one if None."""
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


def _value(text: str, name: str) -> str | None:
    match = re.search(_LINE.format(name=name), text, re.MULTILINE)
    return None if match is None else match[1]


def _pair(version: str | None) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))

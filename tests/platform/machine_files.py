"""Files of a machine, laid out in a folder for `detect_platform` to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def lay_out(root: Path, files: Mapping[str, str]) -> None:
    """Write each text under its path below `root`, with the newline at its end."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

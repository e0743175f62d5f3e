"""Files that commands are asked to write, checked before their work."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ConfigError

__all__ = ["OutputFile", "check_new_folder", "check_output"]

_READ_OF_A_MODEL = ("*.safetensors*", "*.gguf", "*.bin*", "*config.json", "tokenizer*", "*.jinja")
"""Files that are read of a folder that a command reads; others in it may be results."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """path: path of the file itself, behind symbolic links. is_stream: a pipe or a device, which
    keeps its place and takes what is written in order."""

    path: Path
    is_stream: bool

    def write(self, text: str) -> None:
        """Write the whole text into the file that is there, or a new one. Raises OSError."""
        self.path.write_text(text, encoding="utf-8")


def check_output(
    name: str,
    path: Path,
    inputs: Iterable[Path] = (),
    *,
    beside: Sequence[str] = (),
    makes_folder: bool = False,
) -> OutputFile:
    """Raise ConfigError for a path that cannot be written, or at which something would be lost.

    name: name of the path, for the error. inputs: files and folders that the command reads. beside:
    endings of further files that are written next to a file. makes_folder: the command makes the
    folders in which the file will be.
    """
    try:
        fault = _fault(path, inputs, beside, makes_folder)
    except OSError as error:
        fault = f"which cannot be written ({error.strerror})"
    if fault:
        raise ConfigError(f"{name} is {str(path)!r}, {fault}. Name another file.")
    mode = _mode(path)
    is_stream = mode is not None and not stat.S_ISREG(mode)
    # Whatever a link such as /proc/self/fd/1 leads to may have no path of its own.
    return OutputFile(path if is_stream else Path(os.path.realpath(path)), is_stream)


def check_new_folder(path: Path) -> None:
    """Raises ConfigError unless this folder can be made, with those in which it will be."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already; name a folder that does not exist yet")
    try:
        _try_to_write_in(_existing_parent(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made ({error.strerror}). Name another folder."
        ) from error


def _fault(path: Path, inputs: Iterable[Path], beside: Sequence[str], makes_folder: bool) -> str:
    """Return what is wrong with the path, empty if nothing is. Raises OSError."""
    mode = _mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        return "which is a folder"
    if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return "which is neither a file nor a pipe"
    is_stream = mode is not None and not stat.S_ISREG(mode)
    real = Path(os.path.realpath(path))
    written = [path] if is_stream else [real, *(real.with_name(real.name + end) for end in beside)]
    for each in _files_of(inputs):
        for one in written:
            if _mode(one) is not None and os.path.samefile(each, one):
                return f"but {one.name} is read, too ({each})"
    if is_stream:
        return "" if os.access(path, os.W_OK) else "which may not be written to"
    if mode is not None:
        os.close(os.open(real, os.O_WRONLY))
    if mode is None or beside:
        folder = _existing_parent(real) if makes_folder else real.parent
        if not folder.is_dir():
            return f"but {str(folder)!r} is no folder"
        _try_to_write_in(folder)
    return ""


def _mode(path: Path) -> int | None:
    """Return the kind of file behind links; None if nothing is there. Raises OSError."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _files_of(inputs: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that can be looked at; inputs may be texts that name none."""
    for each in inputs:
        try:
            if each.is_dir():
                for pattern in _READ_OF_A_MODEL:
                    yield from each.glob(pattern)
            elif each.is_file() or each.is_fifo():
                yield each
        except OSError:
            continue


def _existing_parent(path: Path) -> Path:
    """Return the nearest folder above that is there. Raises OSError."""
    for parent in path.absolute().parents:
        if _mode(parent) is not None:
            return parent
    return Path(path.anchor)


def _try_to_write_in(folder: Path) -> None:
    """Raises OSError unless files can be made in the folder. Permissions alone do not tell."""
    with tempfile.TemporaryFile(dir=folder):
        pass

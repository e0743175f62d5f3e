"""Files that hold secrets."""

from __future__ import annotations

import stat
from pathlib import Path

from quire.errors import ConfigError

__all__ = ["read_private"]


def read_private(path: Path) -> bytes:
    """Return the contents of a file of this user's, without blanks at both ends. ConfigError if it
    cannot be read, or others may read it."""
    try:
        with path.expanduser().open("rb") as file:
            mode = stat.S_IMODE(path.expanduser().stat().st_mode)
            content = file.read().strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give another file.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{path} has mode {mode:04o}, so that others may read it. `chmod 600 {path}` keeps it "
            "for you."
        )
    return content

"""Adapters by name, as a front hands them to the engine."""

from __future__ import annotations

import threading
from pathlib import Path

from quire.base.errors import ConfigError
from quire.config.adapters.peft import CONFIG_NAME, WEIGHTS_NAME, digest_of, read_adapter
from quire.protocol.adapters import AdapterRef

__all__ = ["AdapterFolders"]


class AdapterFolders:
    """Remembers what was found in folders of adapters; safe to share between threads."""

    def __init__(self, max_rank: int) -> None:
        """max_rank: largest rank that the engine takes."""
        self._max_rank = max_rank
        self._lock = threading.Lock()
        self._found: dict[str, tuple[object, str]] = {}

    def ref(self, name: str, path: str) -> AdapterRef:
        """Return the adapter that is in a folder now. Reads its header, and all of it if it was
        written since the last call. Raises ConfigError as `read_adapter`."""
        folder = Path(path).expanduser().absolute()
        signature = _signature(folder)
        with self._lock:
            known = self._found.get(str(folder))
        if signature is None or known is None or known[0] != signature:
            read_adapter(folder, self._max_rank)
            known = signature, digest_of(folder)
            with self._lock:
                self._found[str(folder)] = known
        return AdapterRef(name, str(folder), known[1])


def _signature(folder: Path) -> object | None:
    """Changes when a file of the folder is written; None if one is missing."""
    try:
        stats = [(folder / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
    except OSError:
        return None
    return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in stats)


def named(entry: str) -> tuple[str, str]:
    """Return name and path of `name=path`. Raises ConfigError for other text."""
    name, sign, path = entry.partition("=")
    if not (name and sign and path):
        raise ConfigError(f"{entry!r} names no adapter; write it as name=path")
    return name, path

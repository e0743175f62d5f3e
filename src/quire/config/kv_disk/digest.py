"""Digests of whole files, remembered by path, size and time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["digest_files", "stamp_files"]


def digest_files(paths: Iterable[Path], memory: Path) -> bytes:
    """Return 32 bytes over the contents of files, whatever their order and their folder.

    memory: a JSON file of digests that were computed before. It is used for files of the same size
    and modification time, to the nanosecond, and is written where that is allowed.
    """
    known = _load(memory)
    places = {path: _place(path) for path in paths}
    missing = [path for path, place in places.items() if place not in known]
    with ThreadPoolExecutor(2, thread_name_prefix="quire-digests") as pool:
        made = dict(zip(missing, pool.map(_digest, missing), strict=True))
    for path, digest in made.items():
        if _place(path) == places[path]:  # else it was written meanwhile
            known[places[path]] = digest
    if made:
        _store(memory, known)
    found = sorted(made.get(path) or known[place] for path, place in places.items())
    return hashlib.sha256("".join(found).encode()).digest()


def stamp_files(paths: Iterable[Path]) -> str:
    """Return a digest over places, sizes and times of files, without a look into them. It changes
    when one is written."""
    places = sorted(_place(path) for path in set(paths))
    return hashlib.sha256("\0".join(places).encode()).hexdigest()


def _place(path: Path) -> str:
    real = path.resolve()
    facts = real.stat()
    return f"{real} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(memory: Path) -> dict[str, str]:
    try:
        found = json.loads(memory.read_bytes())
        return {str(place): str(digest) for place, digest in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _store(memory: Path, known: dict[str, str]) -> None:
    draft = memory.with_name(f"{memory.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):  # then they are computed again
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_text(json.dumps(known))
        draft.chmod(0o600)
        draft.replace(memory)

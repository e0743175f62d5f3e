"""Adapters that requests name in place of the model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from quire.base.errors import ConfigError
from quire.config.adapters import AdapterFolders
from quire.protocol.adapters import AdapterRef
from quire.server.requests.errors import RefusedError

__all__ = ["ServedAdapters", "within"]

logger = logging.getLogger("quire.server")

_CONFIG = "adapter_config.json"
MAX_NAME_CHARS = 128
NAMES = f"1 to {MAX_NAME_CHARS} printable ASCII characters"
"""Form of names of adapters, in messages."""


class ServedAdapters:
    """Folders of adapters by the names that requests give them."""

    def __init__(
        self,
        modules: Mapping[str, str],
        folder: Path | None,
        max_rank: int,
        taken: Iterable[str],
        *,
        max_names: int = 1024,
    ) -> None:
        """modules: folders by name. folder: its sub-folders are adapters under their own names,
        found when a request names one. max_rank: bound of the engine. taken: names of the model.
        max_names: bound of the loaded adapters, and of the listed ones. Raises ConfigError for an
        adapter that cannot be used, a name of the model, or an invalid name."""
        self._taken = frozenset(taken)
        self._folder = folder
        self._folders = AdapterFolders(max_rank)
        self._paths: dict[str, str] = {}
        self._max_names = max_names
        for name, path in modules.items():
            if not _is_name(name):
                raise ConfigError(f"lora_modules has {name[:200]!r}: give {NAMES}.")
            if name in self._taken:
                raise ConfigError(
                    f"lora_modules has {name!r}, which is the model's own name. Give another one."
                )
            self._folders.ref(name, path)
            self._paths[name] = path
        outside = [] if folder is None else [e.name for e in _adapters_in(folder) if e.is_symlink()]
        if outside := [name for name in outside if not self.has(name)]:
            logger.warning(
                "links of lora_folder lead out of it, or have no good name, and are not served: "
                "%s. Copy what they name, or give it as lora_modules.",
                ", ".join(map(repr, outside[:10])),
            )

    @property
    def names(self) -> list[str]:
        """Names that were loaded, and those that lie in the folder, at most `max_names`."""
        found = dict.fromkeys(self._paths)
        if self._folder is not None:
            for each in _adapters_in(self._folder):
                if len(found) >= self._max_names:
                    break
                if self._in_folder(each.name) is not None:
                    found[each.name] = None
        return [name for name in found if name not in self._taken]

    def has(self, name: str) -> bool:
        """Return whether requests may name it."""
        return name in self._paths or self._in_folder(name) is not None

    def path(self, name: str) -> str:
        """Return the folder of an adapter that exists."""
        return self._paths.get(name) or str(self._in_folder(name))

    async def ref(self, name: str) -> AdapterRef:
        """Return what the engine takes. RefusedError for an adapter that cannot be used any more;
        a folder that was written anew is read in a thread."""
        if not self.has(name):  # it was unloaded meanwhile
            raise RefusedError(f"The model `{name[:128]}` does not exist.", status=404)
        try:
            return await asyncio.to_thread(self._folders.ref, name, self.path(name))
        except ConfigError as error:
            message = f"The adapter `{name}` cannot be used: {error}."
            raise RefusedError(message, param="model") from error

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Serve one more. replace: also where another one has the name. RefusedError for a name
        that is taken, a folder outside of the one for adapters, or an adapter that is none."""
        is_there = name in self._paths or self._lies_elsewhere(name, path)
        if name in self._taken or (not replace and is_there):
            raise RefusedError(
                f"The name `{name[:128]}` is taken. Give another, or send load_inplace.",
                param="lora_name",
            )
        if not _is_name(name):
            raise RefusedError(
                f"lora_name is {name[:80]!r}. Give {NAMES}.",
                param="lora_name",
            )
        if name not in self._paths and len(self._paths) >= self._max_names:
            raise RefusedError(
                f"{self._max_names} adapters are loaded, and no more may be (max_adapters). Unload "
                "one first.",
                param="lora_name",
            )
        if self._folder is None:
            raise RefusedError(
                "Adapters are loaded from one folder alone, which this server was not given. Start "
                "it with --lora-folder, and give lora_name and lora_path.",
                param="lora_path",
            )
        folder = within(self._folder, path)
        if folder is None:
            raise RefusedError(
                f"lora_path {path[:200]!r} is outside of the folder for adapters. Give one in it.",
                param="lora_path",
            )
        try:
            await asyncio.to_thread(self._folders.ref, name, str(folder))
        except ConfigError as error:
            message = f"The adapter `{name}` cannot be used: {error}."
            raise RefusedError(message, param="lora_path") from error
        self._paths[name] = str(folder)

    def unload(self, name: str) -> None:
        """Stop serving an adapter, unless the folder has one by this name; requests that use it go
        on.
        Raises RefusedError 404 if it was not loaded."""
        if self._paths.pop(name, None) is None:
            raise RefusedError(
                f"The adapter `{name[:128]}` is not loaded.", status=404, param="lora_name"
            )

    def _in_folder(self, name: str) -> Path | None:
        if self._folder is None or name in self._taken or "/" in name or not _is_name(name):
            return None
        found = within(self._folder, name)
        try:
            return found if found is not None and (found / _CONFIG).is_file() else None
        except OSError:
            return None

    def _lies_elsewhere(self, name: str, path: str) -> bool:
        """Return whether the folder has another adapter of this name than the one at `path`."""
        found = self._in_folder(name)
        return (
            found is not None and self._folder is not None and found != within(self._folder, path)
        )


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and name.isascii() and name.isprintable()


def within(root: Path, path: str) -> Path | None:
    """Return what is there in truth; None if it lies outside of the root, or nowhere."""
    try:
        root, found = root.resolve(), (root / path).resolve()
    except (OSError, RuntimeError, ValueError):  # a name that no file can have
        return None
    return found if root in found.parents else None


def _adapters_in(folder: Path) -> list[Path]:
    try:
        return [each for each in sorted(folder.iterdir()) if (each / _CONFIG).is_file()]
    except OSError:
        return []

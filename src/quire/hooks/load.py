"""Finds hooks by the names of settings."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from quire.base.errors import ConfigError
from quire.base.platform.interrupts import is_ctrl_c
from quire.hooks import OutputHook

__all__ = ["HookSet", "load_hooks"]


@dataclass(frozen=True, slots=True)
class HookSet:
    """Hooks by name. always: watch every request, in this order. offered: watch the requests that
    name them, after these."""

    always: Mapping[str, OutputHook] = field(default_factory=dict[str, OutputHook])
    offered: Mapping[str, OutputHook] = field(default_factory=dict[str, OutputHook])

    @property
    def has_any(self) -> bool:
        return bool(self.always or self.offered)


def load_hooks(given: Sequence[str | OutputHook | Mapping[str, OutputHook]]) -> HookSet:
    """Load what the setting `output_hooks` lists. "module:object" and an object watch every
    request; "name=module:object" and {name: object} are for requests that name them. An object of a
    module may be a hook, or a function or class without arguments that makes one.

    Raises ConfigError naming what cannot be loaded.
    """
    always: dict[str, OutputHook] = {}
    offered: dict[str, OutputHook] = {}
    for each in given:
        if isinstance(each, str):
            name, is_named, path = each.rpartition("=")
            found = _load(path.strip())
            into, name = (offered, name.strip()) if is_named else (always, path.strip())
            _enter(into, name, found)
        elif isinstance(each, Mapping):
            for name, hook in cast("Mapping[str, OutputHook]", each).items():
                _enter(offered, name, hook)
        else:
            _enter(always, type(each).__name__, each)
    return HookSet(always, offered)


def _enter(hooks: dict[str, OutputHook], name: str, hook: object) -> None:
    if not isinstance(hook, OutputHook) or isinstance(hook, type):
        raise ConfigError(
            f"the output hook {name!r} is {str(hook)[:80]!r}, which has no method watch(sequence). "
            "Give an object that follows quire.hooks.OutputHook."
        )
    if not name or name in hooks:
        raise ConfigError(f"two output hooks have the name {name!r}. Give each another one.")
    hooks[name] = hook


def _load(path: str) -> object:
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a user of `quire serve` has hooks
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        if isinstance(found, type) or not isinstance(found, OutputHook):
            found = found() if callable(found) else found
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(
            f"the output hook {path!r} cannot be loaded ({error!r}). Give package.module:object "
            "that can be imported where the server starts."
        ) from error
    return found

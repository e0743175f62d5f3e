"""The front's part of the model: tokenizer, template, and defaults of requests."""

from __future__ import annotations

import time
from dataclasses import fields, replace

from quire.bundled import bundled_model_path
from quire.config.settings import EngineSettings
from quire.config.startup import find_model
from quire.engine.model_front import load_model_front
from quire.engine.supervision.supervisor import SettingValue
from quire.server.generation.backend import ServedModel
from quire.server.settings import ServerSettings

__all__ = [
    "core_settings",
    "front_settings",
    "load_served_model",
    "served_names",
    "with_model",
]

BUNDLED_NAME = "bundled"


def load_served_model(engine: EngineSettings, server: ServerSettings) -> ServedModel:
    """ConfigError if there is no such model, or it lacks a part."""
    settings = with_model(engine)
    found = find_model(settings)  # no plan of the memory: the core may have taken it already
    front = load_model_front(settings, found.folder, found.spec)
    names, root = served_names(engine, server)
    return ServedModel(names, root, int(time.time()), front, settings.seed)


def served_names(engine: EngineSettings, server: ServerSettings) -> tuple[tuple[str, ...], str]:
    """Return the names that requests may give for the model, and the operator's name for it."""
    root = engine.model or BUNDLED_NAME
    return server.served_model_name or (root,), root


def core_settings(settings: EngineSettings) -> dict[str, SettingValue]:
    """Return the settings by name, in the form that the core process takes."""
    return front_settings(with_model(settings))


def front_settings(settings: EngineSettings) -> dict[str, SettingValue]:
    """Return the settings by name, in the form that front processes take: with the operator's name
    of the model, since they serve it by that name."""
    return {item.name: getattr(settings, item.name) for item in fields(settings)}


def with_model(settings: EngineSettings) -> EngineSettings:
    """The settings, with the bundled model where they name none."""
    if settings.model is not None:
        return settings
    return replace(settings, model=str(bundled_model_path()))

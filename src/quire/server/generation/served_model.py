"""The front's part of the model: tokenizer, template, and defaults of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from quire.base.errors import ConfigError
from quire.bundled import BUNDLED_NAME, named_model
from quire.config.adapters import named
from quire.config.settings import EngineSettings, setting_values
from quire.config.startup import find_model
from quire.engine.model_front import ModelFront, load_model_front
from quire.engine.supervision.supervisor import SettingValue
from quire.server.generation.adapters import ServedAdapters
from quire.server.generation.backend import ServedModel
from quire.server.settings import ServerSettings
from quire.text.dialect import Dialect, find_dialect
from quire.text.dialect.harmony import own_template
from quire.text.rendering import RendersChats
from quire.text.rendering.chat_template.cache_lint import CacheRisk, cache_risks
from quire.text.rendering.chat_template.template import ChatTemplate

__all__ = [
    "core_settings",
    "front_settings",
    "load_served_model",
    "model_dialect",
    "served_names",
    "template_risks",
    "with_model",
]

_THINK = ("<think>", "</think>")
_THINKING: Mapping[str, tuple[str, str] | None] = {
    **dict.fromkeys(
        (
            "deepseek_r1", "deepseek_v3", "ernie45", "glm45", "holo2", "hunyuan_a13b", "kimi_k2",
            "minimax_m2", "nemotron_v3", "olmo3", "qwen3", "step3",
        ),
        _THINK,
    ),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "openai_gptoss": None,
}  # fmt: skip
"""Markers by the names of vLLM's `--reasoning-parser`; None where they belong to the format of
calls."""


def load_served_model(engine: EngineSettings, server: ServerSettings) -> ServedModel:
    """Load the front's part of the model. Raises ConfigError if the model or a part is missing."""
    settings = with_model(engine)
    found = find_model(settings)  # no memory plan: the core may have taken the memory already
    front = load_model_front(settings, found.folder, found.spec)
    names, root = served_names(engine, server)
    dialect = model_dialect(front, server.tool_call_parser, server.reasoning_parser)
    adapters = _adapters(engine, server, names)
    return ServedModel(
        names,
        root,
        int(time.time()),
        front,
        settings.seed,
        dialect,
        adapters,
        tuple(template_risks(front, dialect)),
    )


def template_risks(front: ModelFront, dialect: Dialect | None) -> list[CacheRisk]:
    """Return what the model's chat template does that costs cached prefixes."""
    template, tokenizer = front.renderer.chat_template, front.renderer.tokenizer
    if template is None or tokenizer is None or "default" in template.why_broken:
        return []
    sources = {name: template.source(name) for name in template.names}
    special, is_given = tokenizer.special_tokens, template.is_given

    def make(now: Callable[[], datetime]) -> RendersChats:
        own = ChatTemplate(sources, special, now=now, keep_broken=True, is_given=is_given)
        return own_template(dialect, own, lambda: now().date()) or own

    return cache_risks(make)


def _adapters(
    engine: EngineSettings, server: ServerSettings, names: tuple[str, ...]
) -> ServedAdapters | None:
    if not engine.enable_lora:
        if server.lora_modules or server.lora_folder:
            raise ConfigError(
                "lora_modules and lora_folder name adapters, but the engine takes none. Give "
                "--enable-lora too."
            )
        return None
    modules: dict[str, str] = {}
    for name, path in map(named, server.lora_modules):
        if modules.setdefault(name, path) != path:
            raise ConfigError(
                f"lora_modules gives {name[:200]!r} to {modules[name]!r} and {path!r}. Give each "
                "adapter a name of its own."
            )
    folder = None if server.lora_folder is None else Path(server.lora_folder)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"lora_folder is {server.lora_folder!r}, which is no folder. Make it.")
    return ServedAdapters(
        modules, folder, engine.max_lora_rank, names, max_names=server.limits.max_adapters
    )


def model_dialect(
    front: ModelFront, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> Dialect | None:
    """Find the model's format of calls and thinking: from its chat template, unless parsers are
    named. None for a model without chat. Raises ConfigError for an unknown name."""
    renderer = front.renderer
    if reasoning_parser is not None and reasoning_parser not in _THINKING:
        raise ConfigError(
            f"There is no reasoning parser {reasoning_parser!r}. Give one of "
            f"{', '.join(sorted(_THINKING))}, or none: the format is found from the model."
        )
    if renderer.tokenizer is None or renderer.chat_template is None:
        return None
    dialect = find_dialect(renderer.chat_template, renderer.tokenizer, tool_parser)
    markers = _THINKING.get(reasoning_parser or "")
    if markers is None:
        return dialect
    return replace(dialect, thinking=markers).bound(renderer.tokenizer)


def served_names(engine: EngineSettings, server: ServerSettings) -> tuple[tuple[str, ...], str]:
    """Return the names that requests may give for the model, and the operator's name for it."""
    root = engine.model or BUNDLED_NAME
    return server.served_model_name or (root,), root


def core_settings(settings: EngineSettings) -> dict[str, SettingValue]:
    """Return the settings by name, in the form that the core process takes."""
    return front_settings(with_model(settings))


def front_settings(settings: EngineSettings) -> dict[str, SettingValue]:
    """Return the settings by name, for front processes. They include the operator's name of the
    model, since fronts serve it under that."""
    return setting_values(settings)


def with_model(settings: EngineSettings) -> EngineSettings:
    """Return the settings with the path of a model that quire or a package brings, where they name
    it or none. Raises ConfigError if the package is missing."""
    return replace(settings, model=named_model(settings.model))

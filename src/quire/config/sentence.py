"""The files that sentence-transformers puts beside a model: what becomes of its hidden states.

`modules.json` lists the modules in their order, each with the folder of its settings. A checkpoint
without it has none, and defaults apply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire.config.hf import RawConfig, read_json
from quire.errors import ConfigError, RequestError

if TYPE_CHECKING:  # numpy comes with it
    from quire.protocol.pooling_params import Pooling, PoolingParams

__all__ = ["SentenceSettings", "longest_sentence", "module_folders", "read_sentence_settings"]

_MODES: Mapping[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
"""Modes of `pooling_mode`, by their names there."""

_SWITCHES: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""The mode that each switch of older files turns on."""


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """pooling, normalize: of vectors, where a request names none. prompts: texts that stand before
    those of requests, by name; default_prompt: the name of one that stands there unless a request
    names another. classes: how the model's classes are told."""

    pooling: Pooling = "last"
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    classes: Pooling = "classify"

    def prompt(self, name: str | None) -> str:
        """The text before that of a request. RequestError for a name that the model has not."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise RequestError(f"prompt_name is {name!r}, but the model's prompts are: {known}")
        return self.prompts[name]

    def settled(self, params: PoolingParams) -> PoolingParams:
        """Parameters with the model's own values where they have none."""
        if params.pooling == "classify":
            params = replace(params, pooling=self.classes)
        return params.settled(self.pooling, normalize=self.normalize)


def read_sentence_settings(
    folder: Path, *, is_encoder: bool, classes: Pooling = "classify"
) -> SentenceSettings:
    """Read what is there. is_encoder: the mean of an encoder's states is the default, as
    sentence-transformers has it; else the last one's. classes: as of `SentenceSettings`.

    Raises ConfigError for modules and modes that quire lacks, and for a missing file of a mode.
    """
    default: Pooling = "mean" if is_encoder else "last"
    path = folder / "modules.json"
    if not path.is_file():
        return SentenceSettings(default, classes=classes)
    pooling, normalize = default, False
    for kind, module in _modules(path):
        if kind == "Pooling":
            pooling = _read_pooling(folder / module / "config.json", default)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ConfigError(
                f"{path}: module {kind!r} is not supported: quire has Transformer, Pooling and "
                "Normalize"
            )
    prompts, chosen = _read_prompts(folder / "config_sentence_transformers.json")
    return SentenceSettings(pooling, normalize, prompts, chosen, classes)


def longest_sentence(folder: Path) -> int | None:
    """Tokens of the longest prompt that the model was trained with, if the files say."""
    path = folder / "sentence_bert_config.json"
    raw = read_json(path) if path.is_file() else None
    return None if raw is None or not raw.has("max_seq_length") else raw.read_size("max_seq_length")


def module_folders(folder: Path) -> frozenset[str]:
    """Names of the folders in `folder` that hold its modules. ConfigError: no list of modules."""
    path = folder / "modules.json"
    return frozenset(module for _, module in _modules(path)) if path.is_file() else frozenset()


def _modules(path: Path) -> list[tuple[str, str]]:
    """Class and folder of each module, in order."""
    whole = RawConfig({"modules": _read_list(path)}, str(path))
    found: list[tuple[str, str]] = []
    for index, entry in enumerate(whole.read_list(object, "modules") or ()):
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: entry {index} is no module; fetch the file again")
        raw = RawConfig(cast("dict[str, Any]", entry), f"{path}: [{index}]")
        kind = raw.read(str, "type").rpartition(".")[2]
        found.append((kind, raw.read(str, "path", default="")))
    return found


def _read_list(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); fetch the file again") from error


def _read_pooling(path: Path, default: Pooling) -> Pooling:
    if not path.is_file():
        raise ConfigError(
            f"{path}: is missing, though modules.json names its folder, and says how states become "
            "vectors; fetch it from the model's repository"
        )
    raw = read_json(path)
    mode = raw.read_optional(str, "pooling_mode")
    chosen = [mode] if mode else []
    chosen += [name for key, name in _SWITCHES.items() if raw.read(bool, key, default=False)]
    if not chosen:
        return default
    if len(chosen) > 1 or chosen[0] not in _MODES:
        raise ConfigError(
            f"{path}: pooling {' and '.join(chosen)} is not supported; use one of "
            f"{', '.join(_MODES)}"
        )
    raw.reject("include_prompt", False, "vectors are made of prompts as well")
    return _MODES[chosen[0]]


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    if not path.is_file():
        return {}, None
    raw = read_json(path)
    section = raw.section("prompts")
    prompts = {} if section is None else {key: section.read(str, key) for key in section}
    chosen = raw.read_optional(str, "default_prompt_name")
    if chosen is not None and chosen not in prompts:
        raise ConfigError(
            f"{path}: default_prompt_name={chosen!r} is none of prompts; correct the file"
        )
    return prompts, chosen

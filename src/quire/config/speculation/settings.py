"""Meaning of `speculative_config`, in the names of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from quire.base.errors import ConfigError
from quire.base.foreign import nearest

__all__ = [
    "FILE_HEADS",
    "HEADS",
    "HeadMethod",
    "METHODS",
    "MTP",
    "OF_MODELS",
    "SpeculationSettings",
    "parse_speculation",
]

MTP = "mtp"
"""Method that guesses by a layer of the model's own checkpoint."""

HeadMethod = Literal["medusa", "eagle", "eagle3"]
FILE_HEADS: tuple[HeadMethod, ...] = get_args(HeadMethod)
HEADS = (*FILE_HEADS, MTP)
"""Methods that guess from hidden states of the model; the first ones by files of their own."""

WITH_FILES = ("draft_model", *FILE_HEADS)
"""Methods with files of their own, which `model` names."""

OF_MODELS = ("draft_model", *HEADS)
"""Methods with weights of their own, which guess where the model computes."""

METHODS = ("ngram", "suffix", "auto", *OF_MODELS)
"""Methods that guess the next tokens; auto: the better of the first two at each place."""

MAX_DRAFTS = 64

_DEFAULT_DRAFTS = {"ngram": 5, "suffix": 16, "auto": 8, **dict.fromkeys(OF_MODELS, 4)}
_LATER = ("mlp_speculator",)
_SPELLINGS = {
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    **{
        f"{family}_mtp": MTP
        for family in ("deepseek", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5")
    },
}
"""Other names of methods; vLLM names MTP layers by their families too."""

_INTEGERS = {
    "num_speculative_tokens": (1, MAX_DRAFTS),
    "prompt_lookup_min": (1, 256),
    "prompt_lookup_max": (1, 256),
    "suffix_decoding_max_tree_depth": (2, 256),
}


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """method: one of `METHODS`. num_speculative_tokens: most drafts per row and step.
    prompt_lookup_min, prompt_lookup_max: fewest tokens that must have occurred before, and most
    that are compared (ngram).
    max_tree_depth: most tokens of context that are compared (suffix). min_token_prob: a draft is
    left out if the tokens before it make it less likely than this.
    model: a folder or a Hugging Face id (`WITH_FILES`).
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    max_tree_depth: int = 24
    min_token_prob: float = 0.1
    model: str | None = None


def parse_speculation(text: str | None) -> SpeculationSettings | None:
    """Settings of a JSON object; None without one. ConfigError if it asks for what cannot be."""
    if text is None:
        return None
    given = cast("Mapping[str, Any]", json.loads(text))
    known = {"method", "model", *_INTEGERS, "suffix_decoding_min_token_prob"}
    for name in given:
        if name not in known:
            near = nearest(name, sorted(known))
            advice = (
                f"Did you mean {near}?" if near else f"Use some of: {', '.join(sorted(known))}."
            )
            raise ConfigError(f"speculative_config has no key {name!r}. {advice}")
    numbers = {name: _integer(given, name, *bounds) for name, bounds in _INTEGERS.items()}
    method = _method(given)
    shortest, longest = numbers["prompt_lookup_min"], numbers["prompt_lookup_max"]
    default = 2 if method == "auto" else 5
    shortest = shortest or longest or default
    longest = longest or max(shortest, 5)
    if shortest > longest:
        raise ConfigError(
            f"speculative_config has prompt_lookup_min={shortest}, which is above "
            f"prompt_lookup_max={longest}: swap them"
        )
    return SpeculationSettings(
        method,
        numbers["num_speculative_tokens"] or _DEFAULT_DRAFTS[method],
        shortest,
        longest,
        numbers["suffix_decoding_max_tree_depth"] or 24,
        _probability(given, "suffix_decoding_min_token_prob", 0.1),
        _draft_model(given, method) if method in WITH_FILES else None,
    )


def _draft_model(given: Mapping[str, Any], method: str) -> str:
    model = given.get("model")
    if not isinstance(model, str) or not model:
        what = "draft model" if method == "draft_model" else f"weights of {method}"
        raise ConfigError(
            f"speculative_config has method={method!r} and model={model!r}. Name the {what}: a "
            "folder or a Hugging Face id."
        )
    return model


def _method(given: Mapping[str, Any]) -> str:
    """The method, which vLLM's users may also name as the model."""
    model, method = given.get("model"), given.get("method")
    if method is None and model in (*METHODS, *_SPELLINGS):
        model, method = None, model
    if method is None and model is not None:
        method = "draft_model"
    if isinstance(method, str):
        method = _SPELLINGS.get(method, method)
    if method in METHODS:
        if model is not None and method not in WITH_FILES:
            raise ConfigError(
                f"speculative_config names model={model!r}, which method={method!r} does not "
                "read: leave it out"
            )
        return method
    if method in _LATER:
        raise ConfigError(
            f"speculative_config has the method {method!r}, which is not offered yet. "
            f"Give one of: {', '.join(METHODS)}."
        )
    raise ConfigError(
        f"speculative_config has method={method!r}. Give one of: {', '.join(METHODS)}."
    )


def _integer(given: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"speculative_config has {name}={value!r}. Give an integer from {low} to {high}."
        )
    return value


def _probability(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"speculative_config has {name}={value!r}. Give a number from 0 to 1.")
    return float(value)

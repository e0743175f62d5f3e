"""The text model of a checkpoint that has more parts, such as one for images.

transformers writes a nested config without the values that its class has anyway, so that these
defaults belong to the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.config.families import FAMILIES
from quire.config.hf import RawConfig

__all__ = ["TEXT_DEFAULTS", "text_config", "with_unseen"]

TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        kind: defaults
        for family in FAMILIES
        for kind, defaults in (
            (family.model_type, family.text_defaults),
            *family.text_names.items(),
        )
        if defaults is not None
    }
)
"""Values of transformers' config classes where a file is silent, by model_type."""

_SHARED = (
    "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings",
)  # fmt: skip
_OTHER_ATTENTION = ("paligemma",)
"""Models whose text attends to what follows it."""


_FLAT: Mapping[str, str] = MappingProxyType({"qwen2_5_vl": "qwen2_5_vl_text"})
"""Models whose published files have the values of the text model beside those of other parts, and
the `model_type` of that model."""

_UNSEEN = (
    "max_position_embeddings", "rope_theta", "sliding_window", "attn_logit_softcapping",
    "final_logit_softcapping",
)  # fmt: skip
"""Keys whose values no tensor's shape shows."""


def with_unseen(raw: RawConfig) -> RawConfig:
    """The config.json of a text model, with what transformers' class says about `_UNSEEN` keys that
    it leaves out."""
    known = TEXT_DEFAULTS.get(raw.read_optional(str, "model_type") or "", {})
    silent = {key: known[key] for key in _UNSEEN if key in known}
    return raw.with_defaults(silent)


def text_config(raw: RawConfig) -> RawConfig | None:
    """The part of config.json that describes the text model; None if there is no such part, or
    the text model is of no family that is known."""
    whole = raw.as_dict()
    flat = _FLAT.get(raw.read_optional(str, "model_type") or "")
    if flat is not None and not raw.has("text_config") and raw.has("vision_config"):
        del whole["vision_config"]
        whole["model_type"] = flat
        return RawConfig({**TEXT_DEFAULTS[flat], **whole}, raw.source)
    if not isinstance(whole.get("text_config"), dict):
        return None
    nested = raw.section("text_config")
    kind = None if nested is None else nested.read_optional(str, "model_type")
    if nested is None or kind is None or kind not in TEXT_DEFAULTS:
        return None
    if raw.read_optional(str, "model_type") in _OTHER_ATTENTION:
        return None
    outer = {key: whole[key] for key in _SHARED if raw.has(key) and not nested.has(key)}
    own = nested.as_dict()  # with null, which takes a default away
    own.pop("architectures", None)  # of the checkpoint that the text model was made from
    return RawConfig({**TEXT_DEFAULTS[kind], **outer, **own}, f"{raw.source}: text_config")

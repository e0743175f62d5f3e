"""The files that sentence-transformers puts beside a model: the steps after its hidden states.

`modules.json` lists the modules in their order, each with the folder of its settings. A checkpoint
without it has none, and defaults apply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from quire.base.errors import ConfigError, RequestError
from quire.config.hf import RawConfig, read_json

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


_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file of the module Transformer. The first that is there and holds something counts.
"""

_LIBRARY = "sentence_transformers."
"""Beginning of the classes of modules that are not code of the model's own."""

_ORDERS = [
    ["Transformer", *rest] for rest in ([], ["Pooling"], ["Pooling", "Normalize"], ["Normalize"])
]
_ADVICE = "vectors would be others; take it out of the file if that does no harm"
_WITHOUT_EFFECT: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "model": frozenset({
            "add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage",
            "torch_dtype", "trust_remote_code", "use_safetensors",
        }),
        "processor": frozenset({
            "cache_dir", "model_max_length", "padding_side", "trust_remote_code", "use_fast",
        }),
        "config": frozenset({"attn_implementation", "dtype", "torch_dtype", "trust_remote_code"}),
        "processing": frozenset({"padding", "pad_to_multiple_of", "return_tensors", "truncation"}),
    }
)  # fmt: skip
"""Arguments that the file may have for parts of the library, and that change no vector here."""

_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "model_args": "model",
        "model_kwargs": "model",
        "tokenizer_args": "processor",
        "processor_kwargs": "processor",
        "config_args": "config",
        "config_kwargs": "config",
    }
)
"""Keys of such arguments, older names first, and the part that they are for."""

_LONGEST = 1 << 31
"""Tokenizers state larger numbers where they have no bound."""


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """pooling, normalize: defaults for vectors, where a request names none. prompts: texts by name,
    to stand before those of requests; default_prompt: name of the prompt for requests that name
    none. classes: pooling of a model with classes."""

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
    """Read the settings that are there. is_encoder: whether the default is the mean of an encoder's
    states, as in sentence-transformers; else it is the last state. classes: see `SentenceSettings`.

    Raises ConfigError for modules and modes that quire lacks, and for a missing file of a mode.
    """
    default: Pooling = "mean" if is_encoder else "last"
    path = folder / "modules.json"
    if not path.is_file():
        return SentenceSettings(default, classes=classes)
    pooling, normalize = default, False
    modules = _modules(path)
    for kind, module in modules:
        if kind == "Pooling":
            pooling = _read_pooling(folder / module / "config.json", default)
        elif kind == "Normalize":
            normalize = True
            _check_normalize(folder / module / "config.json")
        elif kind == "Transformer":
            _check_transformer(folder)
        else:
            raise ConfigError(
                f"{path}: module {kind!r} is not supported: quire has Transformer, Pooling and "
                "Normalize"
            )
    kinds = [kind for kind, _ in modules]
    if kinds not in _ORDERS:
        raise ConfigError(
            f"{path}: modules {', '.join(kinds) or '(none)'} are not supported in this order: "
            "quire has Transformer, Pooling and Normalize, each at most once"
        )
    prompts, chosen = _read_prompts(folder / "config_sentence_transformers.json")
    return SentenceSettings(pooling, normalize, prompts, chosen, classes)


def longest_sentence(folder: Path, *, is_encoder: bool) -> int | None:
    """Tokens of the longest prompt that the model was trained with, if the files say.

    Those of decoders count where modules.json says that they are there for vectors. The tokenizer's
    own bound is the one where no other is stated.
    """
    is_listed = (folder / "modules.json").is_file()
    if not (is_encoder or is_listed):
        return None
    raw = _transformer_settings(folder)
    for key, part in _PARTS.items() if raw is not None else ():
        section = raw.section(key) if part == "processor" and raw is not None else None
        if section is not None and section.has("model_max_length"):
            return section.read_size("model_max_length")
    if raw is not None and raw.has("max_seq_length"):
        return raw.read_size("max_seq_length")
    tokenizer = folder / "tokenizer_config.json"
    if not is_listed or not tokenizer.is_file():
        return None
    longest = read_json(tokenizer).read_optional(float, "model_max_length")
    return int(longest) if longest is not None and 1 <= longest < _LONGEST else None


def _transformer_settings(folder: Path) -> RawConfig | None:
    """The settings of the module Transformer; None if it has no file."""
    for name in _TRANSFORMER_FILES:
        path = folder / name
        raw = read_json(path) if path.is_file() else None
        if raw is not None and len(raw):
            return raw
    return None


def _check_transformer(folder: Path) -> None:
    """Raise ConfigError for settings of the module Transformer that nothing here obeys."""
    raw = _transformer_settings(folder)
    for key in raw or ():
        if raw is None or not raw.has(key):
            continue
        value = raw.as_dict()[key]
        if key in _PARTS:
            _check_arguments(raw, key, _PARTS[key])
        elif key == "processing_kwargs":
            _check_processing(raw.section(key))
        elif key == "modality_config":
            _check_modality(raw.section(key))
        elif key == "do_lower_case":
            if raw.read(bool, key) and not _lowercases(folder / "tokenizer.json"):
                raw.reject(key, value, "the tokenizer does not do so; save one that does")
        elif key == "transformer_task":
            raw.read_choice(("feature-extraction", "sequence-classification"), key, default="")
        elif key == "module_output_name":
            raw.read_choice(("token_embeddings", "scores"), key, default="")
        elif key not in ("max_seq_length", "unpad_inputs"):
            raw.reject(key, value, _ADVICE)


def _check_arguments(raw: RawConfig, key: str, part: str) -> None:
    section = raw.section(key)
    for name, value in ({} if section is None else section.as_dict()).items():
        if section is not None and name not in _WITHOUT_EFFECT[part] and value is not None:
            section.reject(name, value, _ADVICE)


def _check_processing(section: RawConfig | None) -> None:
    """Check those for texts: arguments for other media and for chats change no vector."""
    for key in ("common", "text") if section is not None else ():
        if section is not None:
            _check_arguments(section, key, "processing")


def _check_modality(section: RawConfig | None) -> None:
    """Texts must pass through the whole model, and give its states or its classes."""
    text = None if section is None else section.section("text")
    if section is not None and text is None:
        raise ConfigError(f"{section.source}: it has no 'text', and quire makes vectors of texts")
    if text is not None:
        text.read_choice(("forward",), "method", default="forward")
        text.read_choice(("last_hidden_state", "logits"), "method_output_name", default="logits")


def _check_normalize(path: Path) -> None:
    raw = read_json(path) if path.is_file() else RawConfig({}, str(path))
    for key in ("module_input_name", "module_output_name"):
        raw.read_choice(("sentence_embedding",), key, default="sentence_embedding")


def _lowercases(path: Path) -> bool:
    """Return whether the tokenizer makes texts lower-case."""
    whole = read_json(path) if path.is_file() else RawConfig({}, str(path))
    first = whole.section("normalizer")
    found = [] if first is None else [first]
    while found:
        each = found.pop()
        kind = each.read(str, "type", default="")
        if kind == "Lowercase" or (kind == "BertNormalizer" and each.read(bool, "lowercase")):
            return True
        nested = cast("tuple[dict[str, Any], ...]", each.read_list(dict, "normalizers") or ())
        found += [RawConfig(part, each.source) for part in nested]
    return False


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
        name = raw.read(str, "type")
        if not name.startswith(_LIBRARY):
            raise ConfigError(
                f"{raw.source}: module {name!r} is code of the model's own, which quire does not "
                "run; use a model whose modules are those of sentence-transformers"
            )
        kind = name.rpartition(".")[2]
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
    raw.read_choice(("SentenceTransformer", "CrossEncoder"), "model_type", default="CrossEncoder")
    section = raw.section("prompts")
    prompts = {} if section is None else {key: section.read(str, key) for key in section}
    chosen = raw.read_optional(str, "default_prompt_name")
    if chosen is not None and chosen not in prompts:
        raise ConfigError(
            f"{path}: default_prompt_name={chosen!r} is none of prompts; correct the file"
        )
    return prompts, chosen

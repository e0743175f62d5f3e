"""Low-rank adapters in PEFT's folders: `adapter_config.json` beside `adapter_model.safetensors`.

Tensors decide which modules an adapter changes; of the configuration only ranks and scales count,
and what would make the numbers mean something else is refused by its name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from quire.config.hf import RawConfig, StoredTensor, read_header, read_json
from quire.errors import ConfigError

__all__ = ["AdapterFolder", "LowRankPair", "digest_of", "read_adapter"]

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use_dora": "merge it into the base model with PEFT",
        "lora_bias": "train it without lora_bias, or merge it into the base model",
        "trainable_token_indices": "merge it into the base model with PEFT",
        "layer_replication": "save the model with its layers, and use that",
        "alora_invocation_tokens": "train it as plain LoRA",
        "use_qalora": "merge it into the base model with PEFT",
        "use_bdlora": "train it as plain LoRA",
        "target_parameters": "give an adapter of modules",
    }
)
"""Keys that change what the tensors mean, and what to do where they are set."""

_HARMLESS = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "use_rslora",
))  # fmt: skip
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
"""Kinds of `init_lora_weights` that subtract something from the base's weights."""

_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.(?!weight$)[^.]+)?\.weight$")
_PREFIXES = ("base_model.model.", "language_model.")
_COPY = re.compile(r"(embed_tokens|lm_head|wte)\.base_layer\.weight$")
_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """W + scale · B A of one module. a: [rank, inputs]; b: [outputs, rank]."""

    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """modules: by the name that the base model gives them. base: its name, if the folder says."""

    folder: Path
    modules: Mapping[str, LowRankPair]
    base: str | None

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(pair.rank for pair in self.modules.values())


def digest_of(folder: Path) -> str:
    """Return the identity of an adapter's contents, in hexadecimal: of both files' bytes. Raises
    ConfigError if one cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        path = folder / name
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise _unreadable(folder, path, error) from error
    return digest.hexdigest()


def read_adapter(folder: Path, max_rank: int | None = None) -> AdapterFolder:
    """Read the configuration and the header of the tensors.

    Raises ConfigError naming the file: missing or broken, a kind of adapter that is not supported,
    a module with one tensor of two, shapes that do not fit each other, or a rank above `max_rank`.
    """
    config = _read_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise _unreadable(folder, path, None)
    sides: dict[str, dict[str, StoredTensor]] = {}
    for tensor in read_header(path):
        if _COPY.search(tensor.name):
            continue  # of the base, which PEFT saves beside adapters of embeddings
        found = _TENSOR.match(tensor.name)
        if found is None:
            raise _not_low_rank(path, tensor)
        if tensor.dtype not in _FLOATS or len(tensor.shape) != 2:
            raise ConfigError(
                f"{path}: tensor {tensor.name!r} is {tensor.dtype} of shape {list(tensor.shape)}; "
                "save the adapter as matrices of floating-point numbers"
            )
        sides.setdefault(_plain(found["module"]), {})[found["side"]] = tensor
    if not sides:
        raise ConfigError(f"{path}: it has no tensor of an adapter; save it with PEFT")
    modules = dict(_pairs(path, sides, config))
    adapter = AdapterFolder(folder, modules, config.read_optional(str, "base_model_name_or_path"))
    if max_rank is not None and adapter.rank > max_rank:
        raise ConfigError(
            f"{folder}: the adapter has rank {adapter.rank}, but the engine holds adapters of up "
            f"to {max_rank}; start it with max_lora_rank={adapter.rank}"
        )
    return adapter


def _read_config(folder: Path) -> RawConfig:
    try:
        is_there = folder.is_dir()
    except OSError:  # a name that no folder can have
        is_there = False
    if not is_there:
        raise ConfigError(f"{folder}: no such folder; give one that PEFT has saved an adapter in")
    config = read_json(folder / CONFIG_NAME)
    kind = config.read(str, "peft_type", default="LORA")
    if kind.upper() != "LORA":
        raise config.unsupported("peft_type", kind, ["LORA"])
    for key, value in config.as_dict().items():
        if value in (None, False, "", "none") or value == [] or value == {}:
            continue
        if key in _REFUSED or key not in _HARMLESS:
            advice = _REFUSED.get(key, "merge the adapter into the base model with PEFT")
            raise ConfigError(f"{config.source}: {key}={_short(value)} is not supported; {advice}")
    if config.has("bias") and config.read(str, "bias") != "none":
        raise config.unsupported("bias", config.read(str, "bias"), ["none"])
    start = cast("object", config.as_dict().get("init_lora_weights"))
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise ConfigError(
            f"{config.source}: init_lora_weights={start!r} means that the base model was changed "
            "too; convert it with PEFT's path_initial_model_for_weight_conversion"
        )
    return config


def _pairs(
    path: Path, sides: Mapping[str, Mapping[str, StoredTensor]], config: RawConfig
) -> Iterator[tuple[str, LowRankPair]]:
    scales = _Scales(config)
    for module, found in sides.items():
        if len(found) < 2:
            (there,) = found
            missing = "B" if there == "A" else "A"
            raise ConfigError(
                f"{path}: module {module!r} has lora_{there} and no lora_{missing}; save it again"
            )
        a, b = found["A"], found["B"]
        if a.shape[0] != b.shape[1] or a.shape[0] == 0:
            raise ConfigError(
                f"{path}: module {module!r} has A of {list(a.shape)} and B of {list(b.shape)}, "
                "which have no rank in common; save it again"
            )
        yield module, LowRankPair(a, b, scales.of(module, a.shape[0]))


class _Scales:
    """Factors of B A: alpha / r, or alpha / √r (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732)."""

    def __init__(self, config: RawConfig) -> None:
        self._source = config.source
        self._rank = config.read_size("r", default=8)
        self._alpha = config.read(float, "lora_alpha", default=8.0)
        self._ranks = self._pattern(config, "rank_pattern")
        self._alphas = self._pattern(config, "alpha_pattern")
        self._has_root = config.read(bool, "use_rslora", default=False)

    def of(self, module: str, rank: int) -> float:
        """The factor of a module whose tensors have this rank. ConfigError if the configuration
        says another rank."""
        stated = self._stated(self._ranks, module, float(self._rank))
        if stated != rank:
            raise ConfigError(
                f"{self._source}: module {module!r} has tensors of rank {rank}, but the "
                f"configuration says {stated:g}; use the files of one adapter"
            )
        alpha = self._stated(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._has_root else rank)

    def _stated(
        self, patterns: Mapping[re.Pattern[str], float], module: str, default: float
    ) -> float:
        return next((n for pattern, n in patterns.items() if pattern.match(module)), default)

    def _pattern(self, config: RawConfig, key: str) -> dict[re.Pattern[str], float]:
        section = config.section(key)
        if section is None:
            return {}
        try:
            return {
                re.compile(rf"(.*\.)?({pattern})$"): section.read(float, pattern)
                for pattern in section
            }
        except re.error as error:
            raise ConfigError(
                f"{section.source}: a key is no regular expression: {error}"
            ) from error


def _plain(module: str) -> str:
    for prefix in _PREFIXES:
        module = module.removeprefix(prefix)
    return module


def _not_low_rank(path: Path, tensor: StoredTensor) -> ConfigError:
    advice = "merge the adapter into the base model with PEFT"
    what = "is no low-rank matrix of a projection"
    if "lora_embedding_" in tensor.name:
        what = "changes the embedding of tokens, which is not supported"
    elif "lora_magnitude_vector" in tensor.name:
        what = "belongs to DoRA, which is not supported"
    elif tensor.name.endswith(".bias"):
        what = "is a bias, which is not supported"
    return ConfigError(f"{path}: tensor {tensor.name[:200]!r} {what}; {advice}")


def _unreadable(folder: Path, path: Path, error: OSError | None) -> ConfigError:
    if (folder / PICKLE_NAME).exists() and path.name == WEIGHTS_NAME:
        return ConfigError(
            f"{folder / PICKLE_NAME}: a pickle file runs code when it is read, so it is refused; "
            "save the adapter as safetensors"
        )
    reason = "is missing" if error is None else f"cannot be read ({error.strerror})"
    return ConfigError(f"{path}: {reason}; give a folder that PEFT has saved an adapter in")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."

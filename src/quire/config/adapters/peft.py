"""Low-rank adapters in PEFT's folders: `adapter_config.json` beside `adapter_model.safetensors`.

Tensors decide which modules an adapter changes; of the configuration only ranks and scales count,
and what would make the numbers mean something else is refused by its name. Names and layouts are
those of PEFT 0.21; matrices of all experts are as `target_parameters` of it lays them out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from quire.base.errors import ConfigError, quoted
from quire.config.checkpoint import name_in_text_part
from quire.config.hf import RawConfig, StoredTensor, read_header, read_json

__all__ = ["AdapterFolder", "LowRankPair", "TokenRows", "digest_of", "read_adapter"]

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use_dora": "merge it into the base model with PEFT",
        "lora_bias": "train it without lora_bias, or merge it into the base model",
        "layer_replication": "save the model with its layers, and use that",
        "alora_invocation_tokens": "train it as plain LoRA",
        "use_qalora": "merge it into the base model with PEFT",
        "use_bdlora": "train it as plain LoRA",
    }
)
"""Keys that change what the tensors mean, and what to do where they are set."""

_HARMLESS = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_rslora",
))  # fmt: skip
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
"""Kinds of `init_lora_weights` that subtract something from the base's weights."""

_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.(?!weight$)[^.]+)?\.weight$")
_OF_TABLE = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(\.[^.]+)?$")
_WHOLE = re.compile(r"(?P<module>.+?)(\.modules_to_save(\.[^.]+)?)?\.weight$")
_BIAS = re.compile(r"(?P<module>.+?)(\.base_layer|\.modules_to_save(\.[^.]+)?)?\.bias$")
_NEW_ROWS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(\.[^.]+)?$")
_UNSUPPORTED = re.compile(r"\.lora_|\.token_adapter\.")
_PREFIX = "base_model.model."
_COPY = re.compile(r"(embed_tokens|lm_head|wte|embed_out)\.base_layer\.weight$")
_TOKENS = "trainable_token_indices"
_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
_WRAPPED = ".base_layer"
"""In the name of a module around which PEFT has put another one."""
_FIRST_BY_OUTPUTS = (0, 19)
"""Version of PEFT that takes matrices of experts [E, O, I] for what they are, not for [E, I, O]."""


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """W + scale · B A of one module. a: [rank, inputs]; b: [outputs, rank].

    Of all experts, num_experts of them: a: [experts · rank, inputs], expert by expert; b: [outputs,
    rank · experts], in which neighbours are of different experts.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    num_experts: int | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0] // (self.num_experts or 1)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """rows: [tokens, width], in place of those of `tokens` in the base's table."""

    tokens: tuple[int, ...]
    rows: StoredTensor


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Tensors of an adapter, by the names that the base model gives its modules. modules:
    projections; the name of experts ends as PEFT has it, with ".base_layer" for each matrix that
    was wrapped later. tables: embeddings, a: [rank, rows], b: [width, rank]. whole: weights that
    replace the base's. biases: biases that replace the base's. tokens: new rows of tables. base:
    name of the base model, if the folder says. swaps_experts: widths of experts' matrices that
    could be both are those of the transposed ones.
    """

    folder: Path
    modules: Mapping[str, LowRankPair]
    tables: Mapping[str, LowRankPair]
    whole: Mapping[str, StoredTensor]
    biases: Mapping[str, StoredTensor]
    tokens: Mapping[str, TokenRows]
    base: str | None
    swaps_experts: bool

    @property
    def rank(self) -> int:
        """The largest of its modules; 0 if it has no low-rank matrix."""
        pairs = (*self.modules.values(), *self.tables.values())
        return max((pair.rank for pair in pairs), default=0)


@dataclass(slots=True)
class _Found:
    """Tensors of a file, by what they are and by module: whole and biases by its plain name, pairs
    by that in the base, and by side."""

    sides: dict[str, dict[str, StoredTensor]] = field(default_factory=dict[str, Any])
    tables: dict[str, dict[str, StoredTensor]] = field(default_factory=dict[str, Any])
    whole: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    biases: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    rows: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])

    def take(self, path: Path, tensor: StoredTensor) -> None:
        """Sort a tensor in. ConfigError for one that has no meaning here."""
        if _COPY.search(tensor.name):
            return  # of the base, which PEFT saves beside adapters of embeddings
        dims = 2
        if match := _TENSOR.match(tensor.name):
            found = self.sides.setdefault(_in_base(match["module"]), {})
            _enter(path, found, match["side"], tensor)
        elif match := _OF_TABLE.match(tensor.name):
            found = self.tables.setdefault(_in_base(match["module"]), {})
            _enter(path, found, match["side"], tensor)
        elif match := _NEW_ROWS.match(tensor.name):
            self.rows[_plain(match["module"])] = tensor
        elif _UNSUPPORTED.search(tensor.name):
            raise _not_low_rank(path, tensor)
        elif match := _BIAS.match(tensor.name):
            _enter(path, self.biases, _plain(match["module"]), tensor)
            dims = 1
        elif match := _WHOLE.match(tensor.name):
            _enter(path, self.whole, _plain(match["module"]), tensor)
            dims = len(tensor.shape)  # a norm's is one row; it is refused by its name
        else:
            raise _not_low_rank(path, tensor)
        if tensor.dtype not in _FLOATS or len(tensor.shape) != dims:
            raise ConfigError(
                f"{path}: tensor {tensor.name!r} is {tensor.dtype} of shape {list(tensor.shape)}; "
                "save the adapter as matrices of floating-point numbers"
            )


def digest_of(folder: Path) -> str:
    """Return the identity of an adapter's contents, in hexadecimal: a hash of both files' bytes.
    Raises ConfigError if one cannot be read."""
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
    found = _Found()
    for tensor in read_header(path):
        found.take(path, tensor)
    if not (found.sides or found.tables or found.whole or found.biases or found.rows):
        raise ConfigError(f"{path}: it has no tensor of an adapter; save it with PEFT")
    scales = _Scales(config)
    tokens = {name: _token_rows(config, name, rows) for name, rows in found.rows.items()}
    _check_tokens(config, tokens)
    adapter = AdapterFolder(
        folder,
        _pairs(path, found.sides, scales),
        _pairs(path, found.tables, scales),
        found.whole,
        found.biases,
        tokens,
        config.read_optional(str, "base_model_name_or_path"),
        _is_older(config.read_optional(str, "peft_version")),
    )
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
            raise ConfigError(f"{config.source}: {key}={quoted(value)} is not supported; {advice}")
    start = cast("object", config.as_dict().get("init_lora_weights"))
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise ConfigError(
            f"{config.source}: init_lora_weights={start!r} means that the base model was changed "
            "too; convert it with PEFT's path_initial_model_for_weight_conversion"
        )
    return config


def _token_rows(config: RawConfig, module: str, rows: StoredTensor) -> TokenRows:
    """Raises ConfigError unless the configuration names a token for each row."""
    key, source = _TOKENS, config
    if isinstance(config.as_dict().get(key), dict) and (own := config.section(key)) is not None:
        source = own
        key = next((name for name in own if f".{module}".endswith(f".{name}")), module)
    tokens = source.read_list(int, key) or ()
    is_of_rows = len(tokens) == rows.shape[0] and len({*tokens}) == len(tokens)
    if not tokens or not is_of_rows or min(tokens) < 0:
        raise ConfigError(
            f"{source.source}: {key} names {len(tokens)} tokens for the {rows.shape[0]} rows of "
            f"{rows.name!r}, each of which is to have one of its own; use the files of one adapter"
        )
    return TokenRows(tokens, rows)


def _check_tokens(config: RawConfig, found: Mapping[str, TokenRows]) -> None:
    """Raises ConfigError for tokens in the configuration whose rows are not there. Those that a
    tied head shares are saved once."""
    stated = cast("object", config.as_dict().get(_TOKENS))
    own = config.section(_TOKENS) if isinstance(stated, dict) else None
    for name in (_TOKENS,) if own is None else own:
        tokens = (own or config).read_list(int, name) or ()
        is_there = any(
            own is None or f".{module}".endswith(f".{name}") or rows.tokens == tokens
            for module, rows in found.items()
        )
        if tokens and not is_there:
            what = _TOKENS if own is None else f"{_TOKENS}.{name}"
            raise ConfigError(
                f"{config.source}: {what} names {len(tokens)} tokens, but {WEIGHTS_NAME} has no "
                "rows for them; use the files of one adapter"
            )


def _pairs(
    path: Path, sides: Mapping[str, Mapping[str, StoredTensor]], scales: _Scales
) -> dict[str, LowRankPair]:
    """Pairs by plain name. Patterns of scales are of the names in `sides`, those in the base."""
    pairs: dict[str, LowRankPair] = {}
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
        num_experts, scale = scales.of(module, a.shape[0])
        name = _plain(module)
        if name in pairs:
            raise _same_module(path, name, pairs[name].a.name, a.name)
        pairs[name] = LowRankPair(a, b, scale, num_experts)
    return pairs


class _Scales:
    """Factors of B A: alpha / r, or alpha / √r (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732)."""

    def __init__(self, config: RawConfig) -> None:
        self._source = config.source
        self._rank = config.read_size("r", default=8)
        self._alpha = config.read(float, "lora_alpha", default=8.0)
        self._ranks = self._pattern(config, "rank_pattern")
        self._alphas = self._pattern(config, "alpha_pattern")
        self._has_root = config.read(bool, "use_rslora", default=False)
        listed = cast("object", config.as_dict().get("target_parameters"))
        names = cast("Sequence[object]", listed) if isinstance(listed, list) else ()
        self._parameters = [str(name).rpartition(".") for name in names]

    def of(self, module: str, rows: int) -> tuple[int | None, float]:
        """Return the number of experts of a module, named as in the base, whose A has this many
        rows, None for other modules, and the factor. Raises ConfigError if the configuration states
        another rank."""
        names = self._names_of(module)
        stated = {self._stated(self._ranks, name, float(self._rank)) for name in names}
        alphas = {self._stated(self._alphas, name, self._alpha) for name in names}
        if len(stated) > 1 or len(alphas) > 1:
            raise ConfigError(
                f"{self._source}: rank_pattern or alpha_pattern tells the matrices of {module!r} "
                "apart, which is not supported; give all parameters of experts one rank and alpha"
            )
        (rank,), (alpha,) = stated, alphas
        is_stacked = names != [module] and rank not in (0, rows) and rows % rank == 0
        if rank != rows and not is_stacked:
            raise ConfigError(
                f"{self._source}: module {module!r} has tensors of rank {rows}, but the "
                f"configuration says {rank:g}; use the files of one adapter"
            )
        factor = alpha / (math.sqrt(rank) if self._has_root else rank)
        return (round(rows / rank) if is_stacked else None), factor

    def _names_of(self, module: str) -> list[str]:
        """The parameters that the tensors of a module may change; its own name if these are its
        weight."""
        owner = module.replace(_WRAPPED, "")
        found = [
            f"{owner}.{name}"
            for end, _, name in self._parameters
            if f".{owner}".endswith(f".{end or 'experts'}")
        ]
        return found or [module]

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


def _is_older(version: str | None) -> bool:
    """Return whether this version of PEFT is before `_FIRST_BY_OUTPUTS`, as are those that did not
    write it down."""
    numbers = [int(part) for part in re.findall(r"\d+", version or "")[:2]]
    return tuple(numbers) < _FIRST_BY_OUTPUTS


def _in_base(module: str) -> str:
    """Return the name of a module in the model that was trained."""
    return module.removeprefix(_PREFIX)


def _plain(module: str) -> str:
    """Return the name that a module has in a model of text alone."""
    module = _in_base(module)
    return name_in_text_part(module) or module


def _enter(path: Path, tensors: dict[str, StoredTensor], name: str, tensor: StoredTensor) -> None:
    """Put a tensor under its name. ConfigError if there is one."""
    if name in tensors:
        raise _same_module(path, name, tensors[name].name, tensor.name)
    tensors[name] = tensor


def _same_module(path: Path, name: str, first: str, second: str) -> ConfigError:
    return ConfigError(
        f"{path}: tensors {first[:200]!r} and {second[:200]!r} are both of {name!r} in a model of "
        "text alone; save the adapter without one of them"
    )


def _not_low_rank(path: Path, tensor: StoredTensor) -> ConfigError:
    advice = "merge the adapter into the base model with PEFT"
    what = "is no low-rank matrix of a projection"
    if "lora_magnitude_vector" in tensor.name:
        what = "belongs to DoRA, which is not supported"
    elif tensor.name.endswith(".bias"):
        what = "is a bias of the adapter itself (lora_bias), which is not supported"
    return ConfigError(f"{path}: tensor {tensor.name[:200]!r} {what}; {advice}")


def _unreadable(folder: Path, path: Path, error: OSError | None) -> ConfigError:
    if (folder / PICKLE_NAME).exists() and path.name == WEIGHTS_NAME:
        return ConfigError(
            f"{folder / PICKLE_NAME}: a pickle file runs code when it is read, so it is refused; "
            "save the adapter as safetensors"
        )
    reason = "is missing" if error is None else f"cannot be read ({error.strerror})"
    return ConfigError(f"{path}: {reason}; give a folder that PEFT has saved an adapter in")

"""Quantization settings of a folder: one scheme, or several by module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from quire.config.hf import RawConfig, read_json
from quire.config.packed.schemes import (
    AWQ,
    GPTQ,
    MXFP4,
    BitsAndBytes4,
    BitsAndBytes8,
    Float8,
    PackedIntegers,
    PlainIntegers,
    Scheme,
    SqueezeLLM,
)
from quire.errors import ConfigError

__all__ = ["BY_TOKEN", "METHODS", "PackedSettings", "SchemeRule", "read_packed_settings"]

BY_TOKEN = "quire_activations_by_token"
"""In quantization_config: the weights are those of `quantization=`, whose activations have one
scale per token. Other engines read the same weights with activations of 16 bits."""
GPTQ_BITS = (2, 3, 4, 8)
_AUTO_ROUND = (
    "auto_round",
    "auto_round:auto_awq",
    "auto_round:auto_gptq",
    "auto_round:awq",
    "auto_round:gptq",
    "auto_round:gptqmodel",
)
"""Packings of AutoRound that are those of AWQ and GPTQ. Without a name, and as gptqmodel has them,
zero points are stored as they are."""


@dataclass(frozen=True, slots=True)
class SchemeRule:
    """The scheme of modules whose names a pattern matches."""

    pattern: re.Pattern[str]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class PackedSettings:
    """source: where this stands, for messages. default: of modules that no rule is for. rules: the
    first that matches holds."""

    source: str
    default: Scheme
    rules: tuple[SchemeRule, ...] = ()

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (self.default, *(rule.scheme for rule in self.rules))

    def scheme_of(self, module: str) -> Scheme:
        """Return the scheme of `module`, if it is quantized at all."""
        for rule in self.rules:
            if rule.pattern.match(module):
                return rule.scheme
        return self.default


def read_packed_settings(folder: Path) -> PackedSettings | None:
    """Read the settings in config.json, or in the files beside it that older tools wrote; None if
    the folder's weights are plain.

    Raises ConfigError, naming file, key and value, for a format that quire does not read.
    """
    raw = _find(folder)
    if raw is None:
        return None
    method = raw.read(str, "quant_method", default="not stated").lower()
    reader = METHODS.get(method)
    if reader is None:
        known = ", ".join(METHODS)
        raise ConfigError(
            f"{raw.source}: quant_method={method!r} is not supported; quire reads {known}: use a "
            "checkpoint of the same model in one of these, or without quantization"
        )
    return reader(raw)


def _find(folder: Path) -> RawConfig | None:
    path = folder / "config.json"
    if path.is_file():
        config = read_json(path)
        section = config.section("quantization_config")
        if section is not None:
            return section
    for name, method in _FILES_BESIDE.items():
        if (folder / name).is_file():
            raw = read_json(folder / name)
            return raw.with_defaults({"quant_method": method})
    return None


def _read_awq(raw: RawConfig) -> PackedSettings:
    bits = raw.read(int, "bits", "w_bit", default=4)
    if bits != 4:
        raise _refused(raw, "bits", bits, "AWQ has 4 bits; use GPTQ for others")
    packing = raw.read(str, "version", default="gemm").lower()
    if packing not in ("gemm", "gemv"):
        raise _refused(raw, "version", packing, "use a checkpoint of version 'gemm' or 'gemv'")
    size = _group_size(raw, "group_size", "q_group_size", default=128)
    return PackedSettings(raw.source, AWQ(size, "gemm" if packing == "gemm" else "gemv"))


def _read_gptq(raw: RawConfig) -> PackedSettings:
    layout = raw.read(str, "checkpoint_format", "format", default="gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        advice = "use a checkpoint in the format 'gptq' or 'gptq_v2'"
        raise _refused(raw, "checkpoint_format", layout, advice)
    default = GPTQ(
        _gptq_bits(raw),
        _group_size(raw, "group_size", default=-1),
        raw.read(bool, "sym", default=True),
        zeros_less_one=layout == "gptq",
    )
    return PackedSettings(raw.source, default, _gptq_rules(raw, default))


def _gptq_rules(raw: RawConfig, default: GPTQ) -> tuple[SchemeRule, ...]:
    """`dynamic`: settings of their own by pattern; "+:" before a pattern means what none does, and
    "-:" leaves modules plain, which what is stored shows."""
    rules: list[SchemeRule] = []
    dynamic = raw.section("dynamic")
    for key in () if dynamic is None else dynamic:
        own = dynamic.section(key) if dynamic is not None and not key.startswith("-:") else None
        if own is not None:
            scheme = replace(
                default,
                bits=_gptq_bits(own, default.bits),
                group_size=_group_size(own, "group_size", default=default.group_size),
                symmetric=own.read(bool, "sym", default=default.symmetric),
            )
            rules.append(SchemeRule(_pattern(raw, key.removeprefix("+:")), scheme))
    return tuple(rules)


def _gptq_bits(raw: RawConfig, default: int | None = None) -> int:
    bits = raw.read(int, "bits") if default is None else raw.read(int, "bits", default=default)
    if bits not in GPTQ_BITS:
        raise _refused(raw, "bits", bits, f"GPTQ has {', '.join(map(str, GPTQ_BITS))}")
    return bits


def _read_auto_round(raw: RawConfig) -> PackedSettings:
    """AutoRound: matrices as GPTQ or AWQ pack them. `extra_config`: settings of their own by name
    or pattern; those of 16 bits are plain, which what is stored shows."""
    packing = raw.read_choice(_AUTO_ROUND, "packing_format", default="auto_round:auto_gptq")
    _refuse_other_numbers(raw)
    if "awq" in packing:
        plain = _read_awq(RawConfig({**raw.as_dict(), "version": "gemm"}, raw.source))
    else:
        first = packing.endswith("gptq")
        layout = "gptq" if first else "gptq_v2"
        plain = _read_gptq(RawConfig({**raw.as_dict(), "checkpoint_format": layout}, raw.source))
    return replace(plain, rules=(*_auto_round_rules(raw, plain.default), *plain.rules))


def _auto_round_rules(raw: RawConfig, default: Scheme) -> Iterator[SchemeRule]:
    modules = raw.section("extra_config")
    for name in modules or ():
        own = None if modules is None else modules.section(name)
        if own is None or own.read(int, "bits", default=4) >= 16:
            continue
        _refuse_other_numbers(own)
        if isinstance(default, GPTQ):
            scheme: Scheme = replace(
                default,
                bits=_gptq_bits(own, default.bits),
                group_size=_group_size(own, "group_size", default=default.group_size),
                symmetric=own.read(bool, "sym", default=default.symmetric),
            )
        else:
            whole = {**raw.as_dict(), **own.as_dict(), "version": "gemm"}
            scheme = _read_awq(RawConfig(whole, own.source)).default
        is_name = re.fullmatch(r"[\w.]+", name) is not None
        text = f"{re.escape(name)}$" if is_name else f".*(?:{name})"
        yield SchemeRule(_pattern(raw, text), scheme)


def _refuse_other_numbers(raw: RawConfig) -> None:
    """Raise ConfigError for weights that are no integers, and for activations of few bits."""
    raw.read_choice(("int",), "data_type", default="int")
    bits = raw.read(int, "act_bits", default=16)
    if bits < 16:
        raise _refused(raw, "act_bits", bits, "use a checkpoint whose activations have 16")


def _read_fp8(raw: RawConfig) -> PackedSettings:
    kind = raw.read(str, "fmt", "weight_format", default="e4m3").lower()
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise _refused(raw, "fmt", kind, "use a checkpoint in e4m3")
    return PackedSettings(raw.source, Float8(_block(raw, "weight_block_size")))


def _read_modelopt(raw: RawConfig) -> PackedSettings:
    own = raw.section("quantization") or raw
    algorithm = own.read(str, "quant_algo", default="not stated")
    if algorithm != "FP8":
        advice = "use the FP8 checkpoint of the same model"
        raise _refused(own, "quant_algo", algorithm, advice)
    return PackedSettings(own.source, Float8())


def _read_mxfp4(raw: RawConfig) -> PackedSettings:
    return PackedSettings(raw.source, MXFP4())


def _read_bitsandbytes(raw: RawConfig) -> PackedSettings:
    if raw.read(bool, "load_in_4bit", "_load_in_4bit", default=False):
        return PackedSettings(raw.source, BitsAndBytes4())
    return PackedSettings(raw.source, BitsAndBytes8())


def _read_squeezellm(raw: RawConfig) -> PackedSettings:
    bits = raw.read(int, "wbits", "bits")
    if bits not in (3, 4):
        raise _refused(raw, "wbits", bits, "SqueezeLLM has 3 or 4")
    return PackedSettings(raw.source, SqueezeLLM(bits))


def _read_compressed_tensors(raw: RawConfig) -> PackedSettings:
    for key in ("sparsity_config", "transform_config"):
        section = raw.section(key)
        if section and section.read(str, "format", default="") != "dense":
            raise _refused(raw, key, list(section), "use a checkpoint of the model without")
    groups = raw.section("config_groups")
    rules: list[SchemeRule] = []
    default: Scheme | None = None
    for name in groups or ():
        group = None if groups is None else groups.section(name)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            continue
        layout = group.read(str, "format", default=raw.read(str, "format", default="dense"))
        activations = group.section("input_activations")
        by_token = raw.read(bool, BY_TOKEN, default=False) or _is_by_token(activations)
        scheme = _compressed_scheme(weights, layout, by_token=by_token)
        for target in group.read_list(str, "targets") or ("Linear",):
            if target == "Linear":
                default = default or scheme
            elif target.startswith("re:"):
                rules.append(SchemeRule(_pattern(group, target.removeprefix("re:")), scheme))
            else:
                rules.append(SchemeRule(re.compile(re.escape(target) + "$"), scheme))
    if default is None and not rules:
        raise _refused(raw, "config_groups", {}, "correct it: no weights are described")
    return PackedSettings(raw.source, default or rules[0].scheme, tuple(rules))


def _is_by_token(activations: RawConfig | None) -> bool:
    """Return whether activations are meant to have 8 bits and one scale per token (or tensor)."""
    if activations is None or activations.read(int, "num_bits", default=8) != 8:
        return False
    if activations.read(str, "type", default="int") != "int":  # FP8 keeps small numbers
        return False
    return activations.read(str, "strategy", default="token") in ("token", "tensor")


def _compressed_scheme(weights: RawConfig, layout: str, *, by_token: bool) -> Scheme:
    """Return the scheme of a group of config_groups. layout: its `format`. by_token: as of
    `PackedIntegers`."""
    bits, kind = weights.read(int, "num_bits", default=8), weights.read(str, "type", default="int")
    symmetric = weights.read(bool, "symmetric", default=True)
    in_groups = weights.read(str, "strategy", default="group") == "group"
    size = _group_size(weights, "group_size", default=-1) if in_groups else -1
    if layout == "mxfp4-pack-quantized":
        return MXFP4()
    if layout == "pack-quantized" and kind == "int" and bits in (4, 8):
        return PackedIntegers(bits, size, symmetric, by_token)
    if layout in ("int-quantized", "naive-quantized") and kind == "int" and bits in (4, 8):
        return PlainIntegers(bits, size, symmetric, by_token)
    if layout in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
        block = _block(weights, "block_structure")
        return Float8((1, size) if size != -1 else block)
    raise ConfigError(
        f"{weights.source}: num_bits={bits} of type={kind!r} in format={layout!r} is not "
        "supported; use a checkpoint of the same model in format 'pack-quantized' or "
        "'int-quantized' (4 or 8 bits), 'float-quantized' or 'mxfp4-pack-quantized'"
    )


_BLOCK = re.compile(r"(\d{1,9})x(\d{1,9})")
"""Outputs and inputs of a block, as compressed-tensors wrote them at first."""


def _block(raw: RawConfig, key: str) -> tuple[int, int] | None:
    if not raw.has(key):
        return None
    text = _BLOCK.fullmatch(str(raw.as_dict()[key]))
    sizes = [int(size) for size in text.groups()] if text else raw.read_list(int, key) or ()
    if len(sizes) != 2 or min(sizes) < 1:
        raise _refused(raw, key, list(sizes), "give outputs and inputs of a block")
    return sizes[0], sizes[1]


def _group_size(raw: RawConfig, *keys: str, default: int) -> int:
    size = raw.read(int, *keys, default=default)
    if size != -1 and size < 1:
        raise _refused(raw, keys[0], size, "give a number of inputs, or -1 for all of them")
    return size


def _pattern(raw: RawConfig, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"{raw.source}: {text!r} is no regular expression ({error}); correct it"
        ) from error


def _refused(raw: RawConfig, key: str, value: object, advice: str) -> ConfigError:
    return ConfigError(f"{raw.source}: {key}={value!r} is not supported; {advice}")


METHODS: Mapping[str, Callable[[RawConfig], PackedSettings]] = MappingProxyType(
    {
        "auto-round": _read_auto_round,
        "awq": _read_awq,
        "bitsandbytes": _read_bitsandbytes,
        "compressed-tensors": _read_compressed_tensors,
        "fbgemm_fp8": _read_fp8,
        "fp8": _read_fp8,
        "gptq": _read_gptq,
        "intel/auto-round": _read_auto_round,
        "modelopt": _read_modelopt,
        "mxfp4": _read_mxfp4,
        "squeezellm": _read_squeezellm,
    }
)
"""Readers by `quant_method`."""

_FILES_BESIDE = MappingProxyType(
    {
        "quantize_config.json": "gptq",
        "quant_config.json": "awq",
        "hf_quant_config.json": "modelopt",
    }
)
"""Files in which older tools wrote the settings, with the method that a file without one means."""

"""What a folder says of how its matrices are quantized: one scheme, or several by module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from quire.config.hf import RawConfig, read_json
from quire.config.packed.schemes import AWQ, GPTQ, Scheme
from quire.errors import ConfigError

__all__ = ["METHODS", "PackedSettings", "SchemeRule", "read_packed_settings"]

GPTQ_BITS = (2, 3, 4, 8)

_CACHE_SCALE = re.compile(
    r"\.(self_attn|attn|attention)\.(([kv]|kv|q|prob|prob_output)_scale"
    r"|[qkv]_proj\.([kv]_scale|output_scale))$"
)


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
        """How `module` is stored, if it is quantized at all."""
        for rule in self.rules:
            if rule.pattern.match(module):
                return rule.scheme
        return self.default

    def is_cache_scale(self, name: str) -> bool:
        """Whether a tensor is a scale of an 8-bit KV cache, which other caches do without."""
        return _CACHE_SCALE.search(name) is not None


def read_packed_settings(folder: Path) -> PackedSettings | None:
    """Of config.json, or of the files beside it in which older tools wrote; None if the folder's
    weights are plain.

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
    layout = raw.read(str, "checkpoint_format", default="gptq").lower()
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
    {"awq": _read_awq, "gptq": _read_gptq}
)
"""By `quant_method`."""

_FILES_BESIDE = MappingProxyType({"quantize_config.json": "gptq", "quant_config.json": "awq"})
"""Where older tools wrote the settings, with the method that a file without one means."""

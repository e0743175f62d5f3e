"""Declaration of a format of quantized checkpoints, and what the readers of settings share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire.base.errors import ConfigError
from quire.config.hf import RawConfig
from quire.config.packed.scheme import Scheme

__all__ = [
    "Format",
    "PackedSettings",
    "RotationRule",
    "SchemeRule",
    "compile_pattern",
    "read_block",
    "read_group_size",
    "refused",
]


@dataclass(frozen=True, slots=True)
class SchemeRule:
    """The scheme of modules whose names a pattern matches."""

    pattern: re.Pattern[str]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class RotationRule:
    """Modules whose inputs and weights are rotated, in blocks of `size` inputs."""

    pattern: re.Pattern[str]
    size: int


@dataclass(frozen=True, slots=True)
class PackedSettings:
    """source: place of these settings, for messages. default: scheme of modules without a rule.
    rules, rotations: rules in order; the first that matches holds."""

    source: str
    default: Scheme
    rules: tuple[SchemeRule, ...] = ()
    rotations: tuple[RotationRule, ...] = ()

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Every scheme, as it is without a rotation."""
        return (self.default, *(rule.scheme for rule in self.rules))

    def scheme_of(self, module: str) -> Scheme:
        """Return the scheme of `module`, if it is quantized at all."""
        matching = (rule.scheme for rule in self.rules if rule.pattern.match(module))
        scheme = next(matching, self.default)
        sizes = (rule.size for rule in self.rotations if rule.pattern.match(module))
        size = next(sizes, 1)
        if size == 1:
            return scheme
        rotated = scheme.rotated(size)
        if rotated is None:
            raise ConfigError(
                f"{self.source}: transform_config rotates {module}, which has no integers; use a "
                "checkpoint of the model without"
            )
        return rotated


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantized checkpoints.

    methods: reader of the settings for each `quant_method`.
    readings: "module:name" of the `Reading` of each scheme, imported when weights load; None if all
    schemes are those of other formats.
    files_beside: files in which older tools wrote the settings, with the method that one without a
    method means.
    marks: ends of names that only tensors of a quantized matrix have.
    """

    methods: Mapping[str, Callable[[RawConfig], PackedSettings]]
    readings: str | None = None
    files_beside: Mapping[str, str] = field(default_factory=dict[str, str])
    marks: tuple[str, ...] = ()


_BLOCK = re.compile(r"(\d{1,9})x(\d{1,9})")
"""Outputs and inputs of a block, as compressed-tensors wrote them at first."""


def read_block(raw: RawConfig, key: str) -> tuple[int, int] | None:
    if not raw.has(key):
        return None
    text = _BLOCK.fullmatch(str(raw.as_dict()[key]))
    sizes = [int(size) for size in text.groups()] if text else raw.read_list(int, key) or ()
    if len(sizes) != 2 or min(sizes) < 1:
        raise refused(raw, key, list(sizes), "give outputs and inputs of a block")
    return sizes[0], sizes[1]


def read_group_size(raw: RawConfig, *keys: str, default: int) -> int:
    size = raw.read(int, *keys, default=default)
    if size != -1 and size < 1:
        raise refused(raw, keys[0], size, "give a number of inputs, or -1 for all of them")
    return size


def compile_pattern(raw: RawConfig, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"{raw.source}: {text!r} is no regular expression ({error}); correct it"
        ) from error


def refused(raw: RawConfig, key: str, value: object, advice: str) -> ConfigError:
    return ConfigError(f"{raw.source}: {key}={value!r} is not supported; {advice}")

"""Integers as the compressed-tensors library stores them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from quire.base.errors import ConfigError
from quire.config.hf import RawConfig
from quire.config.packed.float8.scheme import Float8
from quire.config.packed.format import (
    Format,
    PackedSettings,
    RotationRule,
    SchemeRule,
    compile_pattern,
    read_block,
    read_group_size,
    refused,
)
from quire.config.packed.mxfp4.scheme import MXFP4
from quire.config.packed.parts import INTEGERS, SCALES, Parts
from quire.config.packed.scheme import (
    WHOLE,
    WORD,
    Scheme,
    block_kernel,
    dtype_of,
    found,
    int4_kernel,
    int8_kernel,
    num_groups,
)

__all__ = ["BY_TOKEN", "FORMAT", "PackedIntegers", "PlainIntegers"]

BY_TOKEN = "quire_activations_by_token"
"""In quantization_config: the weights are those of `quantization=`, whose activations have one
scale per token. Other engines read the same weights with activations of 16 bits."""


@dataclass(frozen=True, slots=True)
class PackedIntegers(Scheme):
    """pack-quantized of compressed-tensors: 4 or 8 bits in words, a scale for each output and group
    of inputs. group_size: -1 is all inputs. symmetric: there are no zero points. by_token:
    activations are meant to have 8 bits, with one scale per token. rotation: inputs of a block that
    is multiplied by a Hadamard matrix over the root of its size, 1 for none; so are the weights."""

    bits: int
    group_size: int
    symmetric: bool
    by_token: bool = False
    rotation: int = 1
    name: ClassVar[str] = "compressed-tensors"
    kinds: ClassVar[tuple[str, ...]] = (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
    )  # fmt: skip
    floats: ClassVar[tuple[str, ...]] = ("weight_scale",)
    dropped: ClassVar[tuple[str, ...]] = ("input_scale", "input_zero_point", "output_scale")

    @property
    def rotated_inputs(self) -> int:
        return self.rotation

    def rotated(self, size: int) -> PackedIntegers:
        return replace(self, rotation=size)

    def holds(self, parts: Parts) -> bool:
        return "weight_packed" in parts

    def measure(self, parts: Parts) -> tuple[int, int]:
        outputs, words = parts.matrix("weight_packed", INTEGERS)
        inputs = words * WORD // self.bits
        if "weight_shape" in parts:
            stated = _read_shape(parts)
            if stated[0] != outputs or -(-stated[1] * self.bits // WORD) != words:
                raise parts.refuse("weight_packed", f"{self.bits} bits of shape {list(stated)}")
            inputs = stated[1]
        groups = check_scales(parts, outputs, inputs, self.group_size)
        if not self.symmetric:
            rows = -(-outputs * self.bits // WORD)
            parts.expect("weight_zero_point", (rows, groups), INTEGERS)
        if "weight_g_idx" in parts:
            parts.expect("weight_g_idx", (inputs,), ("I32", "I64"))
        return outputs, inputs

    def kernels(self, inputs: int) -> tuple[str, ...]:
        integers = None
        if self.bits == 4:
            integers = int4_kernel(inputs, self.group_size, zero_points=not self.symmetric)
        return compressed_kernels(self, inputs, integers)


@dataclass(frozen=True, slots=True)
class PlainIntegers(Scheme):
    """int-quantized of compressed-tensors: a byte for each number, even for one of 4 bits.
    group_size, symmetric, by_token, rotation: see `PackedIntegers`."""

    bits: int
    group_size: int
    symmetric: bool
    by_token: bool = False
    rotation: int = 1
    name: ClassVar[str] = "compressed-tensors"
    kinds: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_zero_point")
    floats: ClassVar[tuple[str, ...]] = ("weight_scale",)
    dropped: ClassVar[tuple[str, ...]] = ("input_scale", "input_zero_point", "output_scale")

    @property
    def rotated_inputs(self) -> int:
        return self.rotation

    def rotated(self, size: int) -> PlainIntegers:
        return replace(self, rotation=size)

    def holds(self, parts: Parts) -> bool:
        return dtype_of(parts, "weight") == "I8"

    def measure(self, parts: Parts) -> tuple[int, int]:
        outputs, inputs = parts.matrix("weight", ("I8",))
        check_scales(parts, outputs, inputs, self.group_size)
        if not self.symmetric:
            shape = parts.get("weight_scale").shape
            parts.expect("weight_zero_point", shape, ("I8", "I32", "I64"))
        return outputs, inputs

    def kernels(self, inputs: int) -> tuple[str, ...]:
        integers = None
        if self.symmetric and self.bits == 4 and num_groups(inputs, self.group_size) > 1:
            integers = int4_kernel(inputs, self.group_size, zero_points=False)
        return compressed_kernels(self, inputs, integers)


def _read_shape(parts: Parts) -> tuple[int, int]:
    """Outputs and inputs, of the tensor that states them."""
    codes = {"I32": "<2i", "I64": "<2q"}
    stored = parts.get("weight_shape")
    if stored.dtype not in codes or stored.shape != (2,):
        raise parts.refuse("weight_shape", "two integers")
    outputs, inputs = struct.unpack(codes[stored.dtype], parts.read_small("weight_shape"))
    if inputs < 1:
        raise parts.refuse("weight_shape", f"sizes of at least 1, not {inputs}")
    return cast("int", outputs), cast("int", inputs)


def compressed_kernels(
    scheme: PackedIntegers | PlainIntegers, inputs: int, integers: str | None
) -> tuple[str, ...]:
    """Return the formats of a matrix, the best first. integers: format of `linear_int4`, if it has
    these weights.

    One scale of activations per token adds some 0.04 nats (KL) where scales of 32 inputs add 0.004,
    so only checkpoints that are meant so take it first (docs/quantization.md), and rotated ones,
    which blocks do not serve.
    """
    if integers is None and scheme.symmetric and num_groups(inputs, scheme.group_size) == 1:
        integers = int8_kernel(inputs)
    if scheme.rotation > 1:
        return found(integers)
    kind = f"w{scheme.bits}" if scheme.symmetric else f"w{scheme.bits}_zero"
    blocks = block_kernel(kind, inputs, scheme.group_size)
    return found(integers, blocks) if scheme.by_token else found(blocks, integers)


def check_scales(parts: Parts, outputs: int, inputs: int, group_size: int) -> int:
    """The number of groups of inputs that have a scale. That of the whole matrix is one."""
    stored = parts.get("weight_scale")
    groups = num_groups(inputs, group_size)
    if groups > 1 or stored.shape not in (*WHOLE, (outputs,)):
        parts.expect("weight_scale", (outputs, groups), SCALES)
    elif stored.dtype not in SCALES:
        raise parts.refuse("weight_scale", f"dtype {' or '.join(SCALES)}")
    return groups


def read_compressed_tensors(raw: RawConfig) -> PackedSettings:
    sparsity = raw.section("sparsity_config")
    if sparsity and sparsity.read(str, "format", default="") != "dense":
        raise refused(raw, "sparsity_config", list(sparsity), _WITHOUT)
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
                rules.append(SchemeRule(compile_pattern(group, target.removeprefix("re:")), scheme))
            else:
                rules.append(SchemeRule(re.compile(re.escape(target) + "$"), scheme))
    if default is None and not rules:
        raise refused(raw, "config_groups", {}, "correct it: no weights are described")
    rotations = tuple(_rotations(raw.section("transform_config")))
    return PackedSettings(raw.source, default or rules[0].scheme, tuple(rules), rotations)


_WITHOUT = "use a checkpoint of the model without"


def _rotations(section: RawConfig | None) -> Iterator[RotationRule]:
    """Yield what transform_config says: Hadamard matrices over inputs, whose transposes are in the
    weights already. Raises ConfigError for other transforms."""
    groups = None if section is None else section.section("config_groups")
    if groups is None:
        return
    for name in groups:
        group = groups.section(name)
        if group is None:
            raise refused(groups, "transform_config", name, _WITHOUT)
        size = group.read(int, "block_size", "head_dim", default=0)
        changes = any(
            group.read(bool, key, default=False) for key in ("randomize", "requires_grad")
        )
        listed = cast("tuple[dict[str, Any], ...]", group.read_list(dict, "apply") or ())
        sides = [RawConfig(each, group.source) for each in listed]
        places = {
            (side.read(str, "location"), side.read(bool, "inverse", default=False))
            for side in sides
        }
        targets = {side.read_list(str, "targets") or () for side in sides}
        if (
            group.read(str, "type", default="") != "hadamard"
            or size not in _ROTATIONS
            or changes
            or places != {("input", False), ("weight_input", True)}
            or len(targets) != 1
            or any(side.read_list(str, "ignore") for side in sides)
        ):
            raise refused(group, "transform_config", group.as_dict(), _WITHOUT)
        for target in targets.pop():
            literal = ".*" if target == "Linear" else re.escape(target) + "$"
            is_pattern = target.startswith("re:")
            expression = target.removeprefix("re:") if is_pattern else literal
            yield RotationRule(compile_pattern(group, expression), size)


_ROTATIONS = tuple(1 << power for power in range(4, 13))
"""Sizes of blocks of inputs that `linear_int8` and `linear_int4` rotate."""


def _is_by_token(activations: RawConfig | None) -> bool:
    """Return whether activations are meant to have 8 bits and one scale per token (or tensor)."""
    if activations is None or activations.read(int, "num_bits", default=8) != 8:
        return False
    if activations.read(str, "type", default="int") != "int":  # FP8 keeps small numbers
        return False
    return activations.read(str, "strategy", default="token") in ("token", "tensor")


def _compressed_scheme(weights: RawConfig, layout: str, *, by_token: bool) -> Scheme:
    """Return the scheme of a group of config_groups. layout: its `format`. by_token: see
    `PackedIntegers`."""
    bits, kind = weights.read(int, "num_bits", default=8), weights.read(str, "type", default="int")
    symmetric = weights.read(bool, "symmetric", default=True)
    in_groups = weights.read(str, "strategy", default="group") == "group"
    size = read_group_size(weights, "group_size", default=-1) if in_groups else -1
    if layout == "mxfp4-pack-quantized":
        return MXFP4()
    if layout == "pack-quantized" and kind == "int" and bits in (4, 8):
        return PackedIntegers(bits, size, symmetric, by_token)
    if layout in ("int-quantized", "naive-quantized") and kind == "int" and bits in (4, 8):
        return PlainIntegers(bits, size, symmetric, by_token)
    if layout in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
        block = read_block(weights, "block_structure")
        return Float8((1, size) if size != -1 else block)
    raise ConfigError(
        f"{weights.source}: num_bits={bits} of type={kind!r} in format={layout!r} is not "
        "supported; use a checkpoint of the same model in format 'pack-quantized' or "
        "'int-quantized' (4 or 8 bits), 'float-quantized' or 'mxfp4-pack-quantized'"
    )


FORMAT = Format(
    methods={"compressed-tensors": read_compressed_tensors},
    readings="quire.config.packed.compressed_tensors.read:READINGS",
    marks=(".weight_packed",),
)

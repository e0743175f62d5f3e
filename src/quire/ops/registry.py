"""All operations, and the provider of each that serves on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from quire.base.errors import ConfigError
from quire.base.platform import Platform
from quire.ops.attention.paged_attention import OP as PAGED_ATTENTION
from quire.ops.kv.copy_blocks import OP as COPY_BLOCKS
from quire.ops.kv.rope_and_write_kv import OP as ROPE_AND_WRITE_KV
from quire.ops.kv.swap_blocks import OP as SWAP_BLOCKS
from quire.ops.kv.write_latent import OP as WRITE_LATENT
from quire.ops.linear.blocks import OP as LINEAR_BLOCKS
from quire.ops.linear.by_head import OP as LINEAR_BY_HEAD
from quire.ops.linear.by_head import HeadMatrices
from quire.ops.linear.embedding import OP as EMBEDDING
from quire.ops.linear.int4 import OP as LINEAR_INT4
from quire.ops.linear.int8 import OP as LINEAR_INT8
from quire.ops.linear.low_rank import OP as LOW_RANK
from quire.ops.linear.plain import INVARIANT, PackedMatrix, PartialMatrix
from quire.ops.linear.plain import OP as LINEAR
from quire.ops.linear.plain.contract import NO_PARTIAL
from quire.ops.linear.plain.gated import GatedMatrix
from quire.ops.linear.plain.partial import PlainPartial
from quire.ops.linear.rotate import OP as ROTATE
from quire.ops.linear.tables import OP as LINEAR_TABLES
from quire.ops.moe.experts import OP as EXPERTS
from quire.ops.moe.experts import ExpertLayers
from quire.ops.moe.route import OP as ROUTE
from quire.ops.native.cpu_provider import is_cpu_kernel
from quire.ops.native.team import ALONE, Team
from quire.ops.norm.layer_norm import ADD_OP as ADD_LAYER_NORM
from quire.ops.norm.layer_norm import OP as LAYER_NORM
from quire.ops.norm.norm_rows import OP as NORM_ROWS
from quire.ops.norm.rms_norm import ADD_OP as ADD_RMS_NORM
from quire.ops.norm.rms_norm import OP as RMS_NORM
from quire.ops.operation import Op
from quire.ops.pointwise.activation import MUL_OP as ACTIVATION_AND_MUL
from quire.ops.pointwise.activation import OP as ACTIVATION
from quire.ops.pointwise.activation_times import OP as ACTIVATION_TIMES
from quire.ops.pointwise.add import OP as ADD
from quire.ops.pointwise.rescale import OP as RESCALE
from quire.ops.pointwise.rescale_rows import OP as RESCALE_ROWS
from quire.ops.pointwise.take_columns import OP as TAKE_COLUMNS
from quire.ops.recurrent.gated_delta import OP as GATED_DELTA
from quire.ops.recurrent.keep_tokens import OP as KEEP_TOKENS
from quire.ops.recurrent.short_conv import OP as SHORT_CONV
from quire.ops.recurrent.ssd import OP as SSD
from quire.ops.rows.append_tokens import OP as APPEND_TOKENS
from quire.ops.rows.apply_updates import OP as APPLY_UPDATES
from quire.ops.rows.decode_inputs import OP as DECODE_INPUTS
from quire.ops.rows.step_inputs import OP as STEP_INPUTS
from quire.ops.sampling.draw import OP as DRAW
from quire.ops.sampling.edit_logits import OP as EDIT_LOGITS
from quire.ops.sampling.token_logprobs import OP as TOKEN_LOGPROBS

__all__ = [
    "ALL_OPS",
    "REFERENCE",
    "OpSet",
    "build_op_set",
    "force_gpu_kernels",
    "force_invariance",
    "force_isa",
    "force_linear",
    "select",
]

REFERENCE = "reference"

ALL_OPS: Mapping[str, Op] = MappingProxyType(
    {
        op.name: op
        for op in (
            PAGED_ATTENTION,
            COPY_BLOCKS,
            SWAP_BLOCKS,
            RMS_NORM,
            ADD_RMS_NORM,
            LAYER_NORM,
            ADD_LAYER_NORM,
            NORM_ROWS,
            ADD,
            RESCALE,
            RESCALE_ROWS,
            TAKE_COLUMNS,
            ROPE_AND_WRITE_KV,
            WRITE_LATENT,
            ACTIVATION,
            ACTIVATION_AND_MUL,
            ACTIVATION_TIMES,
            LINEAR,
            LINEAR_BY_HEAD,
            LINEAR_INT8,
            LINEAR_INT4,
            LOW_RANK,
            LINEAR_BLOCKS,
            LINEAR_TABLES,
            ROTATE,
            ROUTE,
            EXPERTS,
            EMBEDDING,
            SHORT_CONV,
            GATED_DELTA,
            KEEP_TOKENS,
            SSD,
            DECODE_INPUTS,
            STEP_INPUTS,
            APPLY_UPDATES,
            APPEND_TOKENS,
            DRAW,
            EDIT_LOGITS,
            TOKEN_LOGPROBS,
        )
    }
)


_OF_INTEGERS = (LINEAR_INT8.name, LINEAR_INT4.name, LINEAR_BLOCKS.name)
"""Products with stored integers."""


@dataclass(frozen=True, slots=True)
class OpSet:
    """The chosen callable of each operation; contracts are the docstrings of `quire.ops.<name>`.

    chosen: provider name by operation, for the start-up report. activation_bits: bits of
    activations in products with stored integers.
    """

    paged_attention: Callable[..., torch.Tensor]
    copy_blocks: Callable[..., None]
    swap_blocks: Callable[..., None]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    layer_norm: Callable[..., torch.Tensor]
    add_layer_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    norm_rows: Callable[..., None]
    add: Callable[..., torch.Tensor]
    rescale: Callable[..., torch.Tensor]
    rescale_rows: Callable[..., torch.Tensor]
    take_columns: Callable[..., torch.Tensor]
    rope_and_write_kv: Callable[..., None]
    write_latent: Callable[..., None]
    activation: Callable[..., torch.Tensor]
    activation_and_mul: Callable[..., torch.Tensor]
    activation_times: Callable[..., torch.Tensor]
    linear: Callable[..., PackedMatrix]
    linear_by_head: Callable[[torch.Tensor], HeadMatrices]
    linear_int8: Callable[..., PackedMatrix]
    linear_int4: Callable[..., PackedMatrix]
    low_rank: Callable[..., None]
    linear_blocks: Callable[..., PackedMatrix]
    linear_tables: Callable[..., PackedMatrix]
    rotate: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    experts: Callable[..., ExpertLayers]
    embedding: Callable[..., torch.Tensor]
    short_conv: Callable[..., torch.Tensor]
    gated_delta: Callable[..., torch.Tensor]
    keep_tokens: Callable[..., None]
    ssd: Callable[..., torch.Tensor]
    decode_inputs: Callable[..., None]
    step_inputs: Callable[..., None]
    apply_updates: Callable[..., None]
    append_tokens: Callable[..., None]
    draw: Callable[..., torch.Tensor]
    edit_logits: Callable[..., torch.Tensor]
    token_logprobs: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    chosen: Mapping[str, str]
    activation_bits: int = 8

    def with_activation_bits(self, bits: int) -> OpSet:
        """Return the operations with layers of stored integers that multiply by activations of 8 or
        of 16 bits."""
        layers = {name: getattr(self, name) for name in _OF_INTEGERS}
        bound = {name: partial(pack, activation_bits=bits) for name, pack in layers.items()}
        return self if bits == 8 else replace(self, **bound, activation_bits=bits)

    def gated_linear(self, name: str, gate: str | None) -> Callable[..., PackedMatrix]:
        """Return `linear` or another linear operation for layers with this gate, None for no gate.
        It applies the gate itself if `activation_and_mul` has the same provider or both are C++
        kernels of any instruction set; otherwise a separate call does."""
        pack, chosen = getattr(self, name), self.chosen[name]
        if gate is None:
            return pack
        provider = ALL_OPS[name].provider(chosen)
        takes_gate = provider is None or "gate" not in provider.lacks
        providers = {chosen, self.chosen[ACTIVATION_AND_MUL.name]}
        is_own = providers == {chosen} != {REFERENCE}
        if takes_gate and (is_own or all(map(is_cpu_kernel, providers))):
            return partial(pack, gate=gate)
        return lambda *args, **kwargs: GatedMatrix(
            pack(*args, **kwargs), self.activation_and_mul, gate
        )

    def partial_linear(self, name: str) -> Callable[..., PartialMatrix]:
        """Return `linear_int8` or `linear_int4` for some of a matrix's inputs: the provider's, or
        the reference's if the provider lacks that. `PlainPartial` is for `linear`, and for
        activations of 16 bits."""
        if self.activation_bits != 8:
            return partial(_plain_partial, getattr(self, name))
        op = ALL_OPS[name]
        provider = op.provider(self.chosen[name])
        if provider is not None and provider.lacks >= NO_PARTIAL:
            return op.reference
        return getattr(self, name)


def _plain_partial(linear: Callable[..., PackedMatrix], *args: Any, **kwargs: Any) -> PlainPartial:
    """Pack some inputs of a matrix. args: arguments of `linear`, the last
    of which is the bias of the whole."""
    *weight, bias = args
    return PlainPartial(linear(*weight, None, **kwargs), bias)


def select(
    op: Op, platform: Platform, forced: str | None = None, team: Team = ALONE
) -> tuple[str, Callable[..., Any]]:
    """Return the name and callable of the best provider that this machine has, or of the forced
    one.

    Raises ConfigError if the forced provider does not exist or cannot run here.
    """
    if forced == REFERENCE:
        return REFERENCE, op.reference
    if forced is not None:
        provider = op.provider(forced)
        if provider is None:
            known = ", ".join([*(each.name for each in op.providers), REFERENCE])
            raise ConfigError(
                f"Operation {op.name} has no such provider: {forced!r}. Use one of: {known}."
            )
        reason = provider.unavailable(platform)
        if reason is not None:
            variable = "QUIRE_CPU_ISA" if is_cpu_kernel(forced) else "QUIRE_GPU_KERNELS"
            raise ConfigError(
                f"Kernels {forced!r} cannot run here ({op.name}): {reason}. "
                f"Give {variable} another value, or unset it."
            )
        return provider.name, provider.load(team)
    for provider in op.providers:
        if provider.unavailable(platform) is None:
            return provider.name, provider.load(team)
    return REFERENCE, op.reference


def build_op_set(
    platform: Platform, forced: Mapping[str, str] | None = None, team: Team = ALONE
) -> OpSet:
    """Choose a provider for every operation.

    forced: provider name by operation name, `{}` for none. team: the threads that compute. Raises
    ConfigError for an unknown operation or a provider that cannot run here.
    """
    wanted = dict(forced or {})
    unknown = sorted(wanted.keys() - ALL_OPS.keys())
    if unknown:
        raise ConfigError(
            f"No such operation: {', '.join(unknown)}. Use one of: {', '.join(ALL_OPS)}."
        )
    picked = {name: select(op, platform, wanted.get(name), team) for name, op in ALL_OPS.items()}
    calls: dict[str, Any] = {name: call for name, (_, call) in picked.items()}
    return OpSet(
        **calls,
        chosen=MappingProxyType({name: provider for name, (provider, _) in picked.items()}),
        activation_bits=8,
    )


def force_gpu_kernels(provider: str | None) -> dict[str, str]:
    """Return `forced` for `build_op_set` with one provider for GPUs for all operations that have
    it.

    provider: `triton`, `none` for plain torch, None for no wish.
    """
    if provider is None:
        return {}
    if provider == "none":
        return dict.fromkeys(ALL_OPS, REFERENCE)
    return {op.name: provider for op in ALL_OPS.values() if op.provider(provider) is not None}


def force_isa(isa: str | None) -> dict[str, str]:
    """Return `forced` for `build_op_set` with one instruction set for all operations.

    isa: avx512 or avx2 (operations without such a provider choose freely), none for plain torch,
    None for no wish.
    """
    if isa is None:
        return {}
    if isa == "none":
        return dict.fromkeys(ALL_OPS, REFERENCE)
    name = f"cpu_{isa}"
    return {op.name: name for op in ALL_OPS.values() if op.provider(name) is not None}


def force_linear(isa: str | None, activation_bits: int = 8) -> dict[str, str]:
    """Return `forced` for `build_op_set` with products of floats on one instruction set; None for
    no wish. Products of integers, where activations have 8 bits, have the same bits on all."""
    names = [LINEAR.name, LINEAR_TABLES.name, *(_OF_INTEGERS if activation_bits == 16 else ())]
    return {} if isa is None else dict.fromkeys(names, f"cpu_{isa}")


def force_invariance(platform: Platform, forced: Mapping[str, str]) -> dict[str, str]:
    """Return `forced` for `build_op_set` under which a row's results do not depend on its batch.
    Only products of plain matrices have providers for which they do.

    Raises ConfigError where no provider computes such products, or `forced` asks for plain torch.
    """
    wanted = forced.get(LINEAR.name)
    if platform.device != "cpu" and wanted != REFERENCE:
        wanted = INVARIANT.name
    chosen, _ = select(LINEAR, platform, wanted)
    if chosen == REFERENCE:
        raise ConfigError(
            "batch_invariant=True needs compiled kernels, since torch rounds the products of a row "
            "by its batch: `quire doctor` says what is missing here."
        )
    return {**forced, LINEAR.name: chosen}

"""Memory of a model by dtype, context and batch, with pages and with pre-allocation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quire.base.errors import ConfigError
from quire.config.memory.amounts import format_bytes
from quire.config.model_spec import ModelSpec
from quire.entrypoints.simulator.memory import UTILIZATION

__all__ = ["KV_BITS", "WEIGHT_BITS", "MemoryQuestion", "MemoryTable", "explore", "render_memory"]

WEIGHT_BITS = (32, 16, 8, 4)
KV_BITS = (32, 16, 8)


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """weight_bits, kv_bits: bits per element; with 0 weight_bits, `weights` counts. context: tokens
    that a request may have. tokens: tokens of a request on average. batch: requests at a time.
    device_bytes: size of the memory. weights: known bytes of the model, None if they are not known.
    device: name of the memory, for people."""

    weight_bits: int = 16
    kv_bits: int = 16
    context: int = 2048
    tokens: int = 512
    batch: int = 32
    block_size: int = 16
    device_bytes: int = 80 * 2**30
    weights: int | None = None
    device: str = ""

    def check(self) -> None:
        """Raise ConfigError if a number cannot be."""
        for name in ("context", "tokens", "batch", "block_size", "device_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give 1 or more")
        if self.tokens > self.context:
            raise ConfigError(
                f"{self.tokens} tokens are more than the context of {self.context}: raise it"
            )
        is_known = self.weight_bits == 0 and self.weights is not None
        if not (is_known or self.weight_bits in WEIGHT_BITS) or self.kv_bits not in KV_BITS:
            raise ConfigError(
                f"weights of {self.weight_bits} bits with a cache of {self.kv_bits} are not "
                f"offered: give one of {WEIGHT_BITS} and one of {KV_BITS}"
            )


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """All sizes in bytes. room: space for the KV cache, 0 if the weights do not fit. kv_of_batch:
    KV of the batch in pages. waste_reserved, waste_paged: shares of allocated slots that hold no
    token. fits_reserved, fits_paged: requests at a time, each with its context reserved, or with
    its pages. bits_per_weight: mean over all weights."""

    weights: int
    kv_per_token: int
    kv_per_request: int
    kv_reserved: int
    kv_of_batch: int
    room: int
    bits_per_weight: float
    waste_reserved: float
    waste_paged: float
    fits_reserved: int
    fits_paged: int

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return asdict(self)


def explore(spec: ModelSpec, question: MemoryQuestion) -> MemoryTable:
    """Compute the table. Sliding windows are left aside. Tables that are looked up keep 16 bits or
    the dtype of `spec`. Raises ConfigError as `MemoryQuestion.check`."""
    question.check()
    matrices = spec.num_parameters - spec.parameters.embedding
    weights = matrices * question.weight_bits // 8
    weights += spec.parameters.embedding * max(spec.dtype_bytes, 2)
    if question.weight_bits == 0:
        weights = question.weights or 0
    per_token = spec.kv_elements * question.kv_bits // 8
    blocks = -(-question.tokens // question.block_size)
    paged_slots = blocks * question.block_size
    room = max(int(question.device_bytes * UTILIZATION) - weights, 0)
    return MemoryTable(
        weights=weights,
        kv_per_token=per_token,
        kv_per_request=per_token * question.tokens,
        kv_reserved=per_token * question.context,
        kv_of_batch=per_token * paged_slots * question.batch,
        room=room,
        bits_per_weight=8 * weights / spec.num_parameters,
        waste_reserved=1 - question.tokens / question.context,
        waste_paged=1 - question.tokens / paged_slots,
        fits_reserved=room // (per_token * question.context),
        fits_paged=room // (per_token * paged_slots),
    )


def render_memory(question: MemoryQuestion, table: MemoryTable) -> str:
    """The table as aligned text."""
    fits = "fits" if table.kv_of_batch <= table.room else "does not fit"
    bits = f"{question.weight_bits} bits"
    if question.weight_bits == 0:
        bits = f"{table.bits_per_weight:.1f} bits in the mean"
    device = format_bytes(question.device_bytes)
    device += f", {question.device}" if question.device else ""
    rows = [
        ("weights", format_bytes(table.weights), bits),
        ("KV per token", format_bytes(table.kv_per_token), f"{question.kv_bits} bits"),
        ("KV per request", format_bytes(table.kv_per_request), f"{question.tokens:,} tokens"),
        ("  reserved", format_bytes(table.kv_reserved), f"a context of {question.context:,}"),
        ("KV of the batch", format_bytes(table.kv_of_batch), f"{question.batch} requests: {fits}"),
        ("room for KV", format_bytes(table.room), f"of {device}"),
        ("waste, reserved", f"{100 * table.waste_reserved:.1f} %", "slots that hold no token"),
        ("waste, paged", f"{100 * table.waste_paged:.1f} %", f"blocks of {question.block_size}"),
        ("fit, reserved", f"{table.fits_reserved:,}", "requests at a time"),
        ("fit, paged", f"{table.fits_paged:,}", "requests at a time"),
    ]
    return "\n".join(f"{name:<17}{value:>12}  {note}" for name, value, note in rows)

"""Time of a step on a device that is not at hand: a roofline of its two kinds of work.

Linear layers read all weights once per step and multiply every token by them; attention reads the
K/V of every sequence's context. Each takes the longer of its memory and its arithmetic time (their
sum on a device that does not overlap them), and they run one after the other (Williams et al. 2009,
Roofline). Host time hides behind the step before, but for a device that is the host itself.

Small blocks limit attention on a GPU: a warp has one block's loads under way at a time, so that
as many blocks as warps arrive per load latency (Little's law).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError
from quire.config.model_spec import ModelSpec
from quire.entrypoints.simulator.devices import Device
from quire.protocol.recovery import RecoveryCosts

__all__ = ["Counts", "StepCost"]

Counts = npt.NDArray[np.int64]

KERNELS_PER_LAYER = 12
"""Norms, products, rotations or biases, cache write, attention, activation, sums."""

WARPS_PER_HEAD = 4
"""Warps that read the blocks of one head of one sequence in turns (PagedAttention's kernel has
thread blocks of 128 threads)."""

LOADS_PER_BLOCK = 2
"""Loads that follow each other: the block table, then K or V."""

ALL_REDUCES_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class _Window:
    """Layers that see the same number of tokens. window: 0 is all."""

    window: int
    num_layers: int


class StepCost:
    """Times of one model, whose weights `num_devices` equal devices share (tensor parallelism).

    block_size: tokens of a block of K/V; None where they lie in one piece.
    """

    def __init__(
        self,
        device: Device,
        spec: ModelSpec,
        *,
        num_devices: int = 1,
        block_size: int | None = 16,
        weight_bits: int | None = None,
        kv_bytes: int | None = None,
    ) -> None:
        """weight_bits: bits per element of matrices; None: the dtype of `spec` decides. kv_bytes:
        bytes per element of the cache, likewise. ConfigError if the heads cannot be shared by so
        many devices."""
        if not spec.has_kv:
            raise ConfigError(
                f"{spec.architecture} keeps no K/V: its costs are not those of attention, which "
                "alone are modelled. Give a model with attention."
            )
        if spec.num_heads % num_devices:
            raise ConfigError(
                f"{spec.num_heads} heads cannot be shared by {num_devices} devices: give a number "
                f"that divides {spec.num_heads}"
            )
        self.device, self.spec, self.num_devices = device, spec, num_devices
        self.block_size = block_size
        self._weight_bytes = spec.dtype_bytes if weight_bits is None else weight_bits / 8
        counts = spec.parameters
        body = spec.num_layers * counts.layer + counts.extra
        self._head = sum(m.outputs * m.inputs * m.count for m in spec.matrices if m.is_head)
        self._head = self._head or spec.vocab_size * spec.hidden_size
        self._active_body = body - counts.idle
        self._experts, self._share_chosen = _experts_of(spec)
        read, multiply = self._read_s, self._multiply_s
        self.token_s = multiply(2.0 * self._active_body)
        self.logits_s = multiply(2.0 * self._head)
        self.weights_s = read((body + self._head) * self._weight_bytes)
        element = spec.dtype_bytes if kv_bytes is None else kv_bytes
        self._kv_token = element * spec.kv_elements
        of_layer = self._kv_token / len(spec.own_kv_shapes)  # others read one of these
        self._context_s = read(of_layer * max(1.0, num_devices / spec.num_kv_heads))
        self._pair_s = multiply(4.0 * spec.num_heads * spec.head_dim)
        self._windows = [
            _Window(window or 0, spec.attention_windows.count(window))
            for window in dict.fromkeys(spec.attention_windows)
        ]
        self._has_windows = any(part.window for part in self._windows)
        self.launch_s = KERNELS_PER_LAYER * spec.num_layers * device.launch_s
        self._block_s = self._seconds_per_block()

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers, on all devices together."""
        return self._kv_token

    @property
    def context_s(self) -> float:
        """To read the K/V of one token of context in all layers, once per sequence and step."""
        return self._context_s * self.spec.num_layers

    @property
    def pair_s(self) -> float:
        """Products of one query with one key and its value, in all layers."""
        return self._pair_s * self.spec.num_layers

    def weight_bytes(self) -> float:
        """Weights on all devices together, embeddings included."""
        spec = self.spec
        tables = spec.parameters.embedding
        matrices = spec.num_parameters - tables
        return matrices * self._weight_bytes + tables * spec.dtype_bytes

    def seconds(self, num_computed: Counts, num_tokens: Counts, num_sampled: int) -> float:
        """Return the time of a step in which each sequence computes `num_tokens` after
        `num_computed`, both int64 [number of sequences], and `num_sampled` of them draw a token."""
        total = int(np.add.reduce(num_tokens))
        if not total:
            return 0.0
        linear = self._longer(
            self._weights_read_s(total), total * self.token_s + num_sampled * self.logits_s
        )
        attention = self._attention_s(num_computed, num_tokens, total)
        return linear + attention + self.launch_s + self._exchange_s(total)

    @property
    def waits_for_host(self) -> bool:
        """Return whether `host_s` is anything but 0."""
        return self.device.host_change_s + self.device.host_enter_s > 0

    def host_s(self, num_entering: int, *, changes_rows: bool) -> float:
        """Return the host time that a step of the engine adds. changes_rows: whether any sequence
        comes, goes or computes another number of tokens than in the step before."""
        kernels = KERNELS_PER_LAYER * self.spec.num_layers if changes_rows else 0
        return kernels * self.device.host_change_s + num_entering * self.device.host_enter_s

    def copy_s(self, num_blocks: int) -> float:
        """To copy blocks to or from the host: one call for K and one for V of each block and layer,
        and the bytes over the device's own link."""
        if not num_blocks or self.block_size is None:
            return 0.0
        calls = 2 * self.spec.num_layers * num_blocks * self.device.copy_call_s
        block = self.block_size * self.kv_bytes_per_token / self.num_devices
        return max(calls, num_blocks * block / self.device.host_bytes_per_s)

    def duplicate_s(self, num_blocks: int) -> float:
        """To copy blocks within the memory: read and written."""
        if not num_blocks or self.block_size is None:
            return 0.0
        return num_blocks * 2 * self.block_size * self.context_s + self.device.launch_s

    def recovery_costs(self) -> RecoveryCosts:
        """Costs by which the scheduler chooses between computing again and swapping."""
        return RecoveryCosts(self.token_s, self.copy_s(1))

    def describe(self) -> dict[str, Any]:
        """For the record of a simulation."""
        return {
            "device": self.device.title,
            "devices": self.num_devices,
            "model": self.spec.architecture or self.spec.model_type,
            "parameters": self.spec.num_parameters,
            "block_size": self.block_size,
            "weights_s": self.weights_s,
            "token_s": self.token_s,
            "context_s": self.context_s,
            "pair_s": self.pair_s,
            "launch_s": self.launch_s,
        }

    def _attention_s(self, num_computed: Counts, num_tokens: Counts, total: int) -> float:
        is_decode = total == len(num_tokens) and int(np.maximum.reduce(num_tokens)) == 1
        if is_decode and not self._has_windows:  # most steps: pairs are contexts
            contexts = int(np.add.reduce(num_computed)) + total
            one = self._longer(self._context_s, self._pair_s) * contexts
            if self._most_loads_s(contexts, total) > one:
                one = max(one, self._loads_s(num_computed + 1))
            return one * self.spec.num_layers
        ends = num_computed + num_tokens
        seconds = 0.0
        pairs = num_tokens * (num_computed + (num_tokens + 1) / 2)
        for part in self._windows:
            seen, products = ends, pairs
            if part.window:
                seen = np.minimum(ends, part.window + num_tokens)
                products = np.minimum(pairs, num_tokens * float(part.window))
            reading, multiplying = seen * self._context_s, products * self._pair_s
            if self.device.overlaps:
                one = float(np.maximum(reading, multiplying).sum())
            else:
                one = float((reading + multiplying).sum())
            seconds += max(one, self._loads_s(seen)) * part.num_layers
        return seconds

    def _loads_s(self, seen: Counts) -> float:
        """Seconds in which the blocks of one layer arrive, however few bytes they have."""
        if not self._block_s or self.block_size is None:
            return 0.0
        num_blocks = int((-(-seen // self.block_size)).sum())
        return num_blocks * self._seconds_per_load(len(seen))

    def _most_loads_s(self, contexts: int, num_sequences: int) -> float:
        """Return an upper bound of `_loads_s` by the sum of what the sequences see."""
        if not self._block_s or self.block_size is None:
            return 0.0
        num_blocks = contexts / self.block_size + num_sequences
        return num_blocks * self._seconds_per_load(num_sequences)

    def _seconds_per_load(self, num_sequences: int) -> float:
        heads = num_sequences * self.spec.num_heads / self.num_devices
        return self._block_s / min(heads * WARPS_PER_HEAD, self.device.max_warps)

    def _seconds_per_block(self) -> float:
        """Return what the blocks of all heads of one sequence cost one warp."""
        if self.block_size is None:
            return 0.0
        heads = self.spec.num_heads / self.num_devices
        return 2 * LOADS_PER_BLOCK * self.device.load_latency_s * heads

    def _weights_read_s(self, num_tokens: int) -> float:
        """To read the matrices once, of experts those that some token is likely to choose."""
        if not self._experts:
            return self.weights_s
        idle = (1.0 - self._share_chosen) ** num_tokens
        return self.weights_s - self._read_s(self._experts * self._weight_bytes) * idle

    def _exchange_s(self, num_tokens: int) -> float:
        if self.num_devices == 1:
            return 0.0
        n, spec = self.num_devices, self.spec
        sent = 2 * (n - 1) / n * num_tokens * spec.hidden_size * spec.dtype_bytes
        one = self.device.all_reduce_s + sent / self.device.link_bytes_per_s
        return ALL_REDUCES_PER_LAYER * spec.num_layers * one

    def _longer(self, reading: float, multiplying: float) -> float:
        return max(reading, multiplying) if self.device.overlaps else reading + multiplying

    def _read_s(self, num_bytes: float) -> float:
        device = self.device
        return num_bytes / self.num_devices / (device.bytes_per_s * device.read_share)

    def _multiply_s(self, num_operations: float) -> float:
        device = self.device
        return num_operations / self.num_devices / (device.flop_per_s * device.arithmetic_share)


def _experts_of(spec: ModelSpec) -> tuple[int, float]:
    """Return the parameters of all experts, and the share of them that one token chooses."""
    if spec.experts is None:
        return 0, 1.0
    routing = spec.experts.routing
    share = routing.top_k / routing.num_experts
    return round(spec.parameters.idle / (1.0 - share)) if share < 1.0 else 0, share

"""How long a step takes on a GPU that is not at hand: a roofline of its two kinds of work.

Linear layers read all weights once per step and multiply every token by them; attention reads the
K/V of every sequence's context. Each takes the longer of its memory and its arithmetic time, and
they run one after the other (Williams et al. 2009, Roofline). So a decode step of few sequences
costs what the weights take to read, each token beyond that its products, and each token of context
its K/V. Host time is taken as hidden behind the step before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["A100", "LLAMA_3_8B", "LLAMA_13B", "Device", "ModelShape", "StepCost"]

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of the data sheet, in bytes and 16-bit operations per second, and the shares of them
    that kernels reach."""

    name: str
    bytes_per_s: float
    flop_per_s: float
    read_share: float
    arithmetic_share: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """num_weights: those that a token is multiplied by. attention_size: query heads × head size.
    kv_size: K/V heads × head size. All numbers have 16 bits."""

    name: str
    num_weights: float
    num_layers: int
    attention_size: int
    kv_size: int

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * 2 * self.num_layers * self.kv_size


# NVIDIA's data sheet of the A100 40 GB SXM. The shares are ours, within what engines publish: 50 to
# 75 % of the bandwidth while they decode, 40 to 55 % of the products while they prefill.
A100 = Device("A100 40 GB", 1.555e12, 312e12, read_share=0.7, arithmetic_share=0.5)

# Touvron et al. 2023 (LLaMA), table 2; the embedding, 32,000 × 5,120, is looked up.
LLAMA_13B = ModelShape("LLaMA-13B", 13.016e9 - 32000 * 5120, 40, 5120, 5120)
# Grattafiori et al. 2024 (Llama 3), table 3; the embedding, 128,256 × 4,096, is looked up.
LLAMA_3_8B = ModelShape("Llama-3.1-8B", 8.030e9 - 128256 * 4096, 32, 4096, 1024)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one model on one device."""

    device: Device
    model: ModelShape

    @property
    def weights_s(self) -> float:
        """To read all weights once: no step takes less."""
        return self._read_s(2 * self.model.num_weights)

    @property
    def token_s(self) -> float:
        """Products of one more token, once they outweigh the reading of the weights."""
        return self._multiply_s(2 * self.model.num_weights)

    @property
    def context_s(self) -> float:
        """To read the K/V of one token of context, once per sequence and step."""
        return self._read_s(self.model.kv_bytes_per_token)

    @property
    def pair_s(self) -> float:
        """Products of one query with one key and its value, in all layers."""
        return self._multiply_s(4 * self.model.attention_size * self.model.num_layers)

    def seconds(self, num_computed: Counts, num_tokens: Counts) -> float:
        """Of a step in which each sequence computes `num_tokens` after `num_computed`.
        Both int64, [number of sequences]."""
        linear = max(self.weights_s, int(num_tokens.sum()) * self.token_s)
        reading = (num_computed + num_tokens) * self.context_s
        pairs = num_tokens * (num_computed + (num_tokens + 1) / 2)
        return linear + float(np.maximum(reading, pairs * self.pair_s).sum())

    def describe(self) -> dict[str, float | str]:
        """For the record of a measurement."""
        return {
            "device": self.device.name,
            "model": self.model.name,
            "read_share": self.device.read_share,
            "arithmetic_share": self.device.arithmetic_share,
            "weights_s": self.weights_s,
            "token_s": self.token_s,
            "context_s": self.context_s,
            "pair_s": self.pair_s,
        }

    def _read_s(self, num_bytes: float) -> float:
        return num_bytes / (self.device.bytes_per_s * self.device.read_share)

    def _multiply_s(self, num_operations: float) -> float:
        return num_operations / (self.device.flop_per_s * self.device.arithmetic_share)

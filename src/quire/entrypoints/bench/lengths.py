"""Workloads: lengths of prompts and outputs, and random token ids to fill them.

Everything is drawn from seeded generators, so a workload is named by its parameters and its seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError

__all__ = [
    "DATASETS",
    "LengthRange",
    "LogNormal",
    "Workload",
    "describe_lengths",
    "draw_workload",
    "parse_lengths",
    "random_prompts",
]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Uniform over low … high, both included; one value if they are equal."""

    low: int
    high: int

    def draw(self, generator: np.random.Generator, count: int) -> Ints:
        """int64 [count]."""
        return generator.integers(self.low, self.high + 1, count)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths whose logarithm is normal. mean: mean of the lengths. sigma: standard deviation of
    their logarithm."""

    mean: float
    sigma: float

    def draw(self, generator: np.random.Generator, count: int) -> Ints:
        """int64 [count], at least 1. With mu = ln(mean) - sigma²/2 the mean is `mean`."""
        mu = np.log(self.mean) - self.sigma**2 / 2
        return np.maximum(np.rint(generator.lognormal(mu, self.sigma, count)), 1).astype(np.int64)


Lengths = LengthRange | LogNormal

# The means are those of Kwon et al. 2023 (PagedAttention), figure 11. It gives histograms but
# no further moments; the sigmas are our reading of their tails (ShareGPT broad, Alpaca narrow).
DATASETS: Mapping[str, tuple[LogNormal, LogNormal]] = {
    "sharegpt": (LogNormal(161.0, 1.0), LogNormal(338.0, 0.9)),
    "alpaca": (LogNormal(19.0, 0.5), LogNormal(58.0, 0.9)),
}
"""Lengths of prompts and outputs that look like those of a data set."""


@dataclass(frozen=True, slots=True)
class Workload:
    """prompt_lengths, output_lengths: tokens, by request."""

    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_lengths)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)


def parse_lengths(text: str) -> LengthRange:
    """ "64" or "100-1024". Raises ConfigError."""
    low, dash, high = text.partition("-")
    if low.isdigit() and (high.isdigit() if dash else True):
        found = LengthRange(int(low), int(high) if dash else int(low))
        if 1 <= found.low <= found.high:
            return found
    raise ConfigError(f"Length {text!r} is neither a number nor a range. Give 64 or 100-1024.")


def describe_lengths(lengths: Lengths) -> dict[str, Any]:
    """For the record of a measurement."""
    return {"distribution": type(lengths).__name__, **asdict(lengths)}


def draw_workload(
    prompts: Lengths,
    outputs: Lengths,
    count: int,
    seed: int,
    max_model_len: int,
    max_output_len: int | None = None,
) -> Workload:
    """Lengths of `count` requests. Log-normal ones are cut where they exceed the context: outputs
    to `max_output_len`, prompts to leave room for one token, then outputs to what is left.

    Raises ConfigError if lengths that the user fixed do not fit: they are never cut.
    """
    fixed = [lengths.high for lengths in (prompts, outputs) if isinstance(lengths, LengthRange)]
    if sum(fixed) + (2 - len(fixed)) > max_model_len:
        raise ConfigError(
            f"Lengths of up to {' and '.join(map(str, fixed))} tokens do not fit "
            f"max_model_len={max_model_len}. Lower them or raise max_model_len."
        )
    generator = np.random.default_rng(seed)
    prompt_lengths = np.minimum(prompts.draw(generator, count), max_model_len - 1)
    output_lengths = outputs.draw(generator, count)
    if max_output_len is not None:
        output_lengths = np.minimum(output_lengths, max_output_len)
    output_lengths = np.minimum(output_lengths, max_model_len - prompt_lengths)
    return Workload(tuple(prompt_lengths.tolist()), tuple(output_lengths.tolist()))


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids, uniform over the vocabulary; no two prompts share a prefix but by chance."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]

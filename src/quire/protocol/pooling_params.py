"""How the hidden states of a prompt become one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError
from quire.protocol.sampling_params import SamplingParams

__all__ = [
    "POOLED_PARAMS",
    "Pooling",
    "PoolingParams",
    "normalized",
    "pooling_for",
    "reads_whole_prompt",
]

Pooling = Literal["last", "cls", "mean"]
"""Of the hidden states after the final norm: that of the last token, that of the first one, or the
mean of all."""

POOLED_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""Sampling parameters of a request that pools: it draws nothing."""

_LEAST_NORM = 1e-12


def reads_whole_prompt(pooling: Pooling | None) -> bool:
    """Whether the vector depends on hidden states that a cached prefix would leave uncomputed."""
    return pooling in ("cls", "mean")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of `LLM.encode`. Raises RequestError, naming the field and what to change.

    pooling: "last" takes the hidden state of the prompt's last token, "cls" that of its first, and
        "mean" averages those of all its tokens.
    normalize: scale the vector to length 1.
    truncate_prompt_tokens: cut the prompt to its last tokens, so many; -1 for as many as fit.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise RequestError(
                f"pooling is {self.pooling!r}: give one of {', '.join(get_args(Pooling))}"
            )
        if not isinstance(cast("object", self.normalize), bool):
            raise RequestError(f"normalize is {self.normalize!r}: it is a switch, True or False")
        SamplingParams(truncate_prompt_tokens=self.truncate_prompt_tokens)  # checks it


def normalized(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vector [E], scaled to length 1; one of zeros stays as it is."""
    wide = vector.astype(np.float64)
    return (wide / max(float(np.linalg.norm(wide)), _LEAST_NORM)).astype(np.float32)


def pooling_for(
    count: int, given: PoolingParams | Sequence[PoolingParams] | None
) -> Sequence[PoolingParams]:
    """Parameters for each of `count` prompts. RequestError if `given` are other objects, or not so
    many."""
    if given is None or isinstance(given, PoolingParams):
        return [given or PoolingParams()] * count
    many: list[object] = list(given) if isinstance(given, list | tuple) else [given]
    for params in many:
        if not isinstance(params, PoolingParams):
            raise RequestError(
                f"pooling_params has a {type(params).__name__}: give PoolingParams(pooling=…), "
                "since encode draws no tokens"
            )
    if len(many) != count:
        raise RequestError(
            f"there are {count} prompts but {len(many)} pooling_params: give one for all, or one "
            "per prompt"
        )
    return cast("list[PoolingParams]", many)

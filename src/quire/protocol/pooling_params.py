"""Pooling of a prompt's hidden states into one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from quire.base.errors import RequestError
from quire.protocol.sampling_params import SamplingParams

__all__ = [
    "CLASSIFYING",
    "POOLED_PARAMS",
    "ClassActivation",
    "Pooling",
    "PoolingParams",
    "activated",
    "class_probabilities",
    "normalized",
    "pooling_for",
    "reads_whole_prompt",
]

Pooling = Literal["last", "cls", "mean", "classify", "classify_last", "classify_mean"]
"""Hidden states after the final norm that count: the last token's, the first one's, or the mean of
all. "classify": numbers of the model's classes at the first token; "classify_last": at the last
one; "classify_mean": at the mean of all."""

CLASSIFYING: tuple[Pooling, ...] = ("classify", "classify_last", "classify_mean")
"""Ways to pool that give the numbers of classes."""

ClassActivation = Literal["softmax", "sigmoid", "none"]
"""Function of the numbers of all classes together, of each alone, or none."""

POOLED_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""Sampling parameters of a request that pools: it draws nothing."""

_LEAST_NORM = 1e-12


def reads_whole_prompt(pooling: Pooling | None) -> bool:
    """Return whether the vector depends on hidden states that a cached prefix would leave
    uncomputed."""
    return pooling in ("cls", "mean", "classify", "classify_mean")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of `LLM.encode`, `embed`, `score` and `classify`. Raises RequestError, naming the
    field and what to change.

    pooling: "last" takes the hidden state of the prompt's last token, "cls" that of its first, and
        "mean" averages those of all its tokens; "classify" takes the numbers of the classes at the
        token by which the model tells them. None: choice of the model's files.
    normalize: scale the vector to length 1; None: choice of the model's files.
    truncate_prompt_tokens: number of last tokens to keep of the prompt; -1 for as many as fit.
        Encoders keep the first ones instead, with the closing one.
    dimensions: number of first components to keep of the vector, which is then scaled to length 1.
    use_activation: turn the model's numbers of classes into probabilities, and a cross-encoder's
        number into a score.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in (None, *get_args(Pooling)):
            raise RequestError(
                f"pooling is {self.pooling!r}: give one of {', '.join(get_args(Pooling))}"
            )
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            may_be_open = name == "normalize" and value is None
            if not isinstance(value, bool) and not may_be_open:
                raise RequestError(f"{name} is {value!r}: it is a switch, True or False")
        wanted: object = self.dimensions
        is_count = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1
        if wanted is not None and not is_count:
            raise RequestError(f"dimensions is {wanted!r}: give a number of at least 1")
        SamplingParams(truncate_prompt_tokens=self.truncate_prompt_tokens)  # checks it

    def settled(self, pooling: Pooling, *, normalize: bool) -> PoolingParams:
        """The same with values where they are None."""
        return replace(
            self,
            pooling=self.pooling or pooling,
            normalize=normalize if self.normalize is None else self.normalize,
        )

    def finished(self, vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The vector [E] as it was asked for. RequestError if it has fewer dimensions."""
        if self.dimensions is not None:
            if self.dimensions > len(vector):
                raise RequestError(
                    f"dimensions is {self.dimensions}, but vectors of this model have "
                    f"{len(vector)}: give 1 to that"
                )
            return normalized(vector[: self.dimensions])
        return normalized(vector) if self.normalize else vector


def normalized(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vector [E], scaled to length 1; one of zeros stays as it is."""
    wide = vector.astype(np.float64)
    return (wide / max(float(np.linalg.norm(wide)), _LEAST_NORM)).astype(np.float32)


def activated(
    numbers: npt.NDArray[np.float32], activation: ClassActivation
) -> npt.NDArray[np.float32]:
    """Apply the function to numbers [C], in float64."""
    wide = numbers.astype(np.float64)
    if activation == "softmax":
        wide = np.exp(wide - wide.max())
        wide /= wide.sum()
    elif activation == "sigmoid":
        wide = np.exp(-np.logaddexp(0.0, -wide))
    return wide.astype(np.float32)


def class_probabilities(
    numbers: npt.NDArray[np.float32], activation: ClassActivation, params: PoolingParams
) -> npt.NDArray[np.float32]:
    """Make probabilities, [C], of a model's numbers for its classes [C]; or give these, if so
    asked. activation: the model's."""
    return activated(numbers, activation if params.use_activation else "none")


def pooling_for(
    count: int, given: PoolingParams | Sequence[PoolingParams] | None
) -> Sequence[PoolingParams]:
    """Return the parameters of each of `count` prompts.
    Raises RequestError if `given` are other objects, or of another number."""
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

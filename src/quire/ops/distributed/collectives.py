"""Operations that all ranks of a tensor-parallel group do together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

import torch

from quire.base.errors import EngineError

__all__ = [
    "ALONE",
    "Alone",
    "Collectives",
    "Reduction",
    "TorchCollectives",
    "as_tree",
    "together",
]

Reduction = Literal["sum", "max"]
Result = TypeVar("Result")
Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Collectives(Protocol):
    """Every rank calls the same operations in the same order, with tensors of one shape. They raise
    EngineError if another rank failed in its step, and EngineLostError if the group is over."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """x of all ranks, added as a tree (`as_tree`) or the largest of each element, with the same
        bits on each rank. A NaN stays NaN."""
        ...

    def sum_rows(
        self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """float32 x [T, N] of all ranks added likewise, and then bias [N]; rounded once to
        `dtype`."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N] of all ranks side by side, in the order of the ranks: [..., size · N]."""
        ...

    def look_up(
        self,
        ids: torch.Tensor,
        own: range,
        most: int,
        rows: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Rows [T, E] of ids [T] in a table of which each rank has `most` rows, the last one fewer.
        own: indices of this rank's. rows: gives those by their index among them."""
        ...

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """RMSNorm of rows in place, as the operation `norm_rows`, of which x [T, N] are this rank's
        parts, with any row stride. weight: [N], likewise. A part that several ranks have counts for
        each of them."""
        ...

    def agree(self, *, is_fine: bool) -> bool:
        """Return whether all ranks are fine. If not, operations of which a rank was left out are
        forgotten, and all go on alike. To be called at the end of what one rank may fail in.
        EngineLostError if ranks have noted different things."""
        ...

    def note(self, decided: bytes) -> None:
        """Note what this rank has decided, such as drawn tokens: all must decide the same."""
        ...


def as_tree(add: Join, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors added as a binary tree: neighbours first, then pairs of them, and so on. What has no
    neighbour waits for the next round."""
    if len(given) == 1:
        return given[0].clone()
    while len(given) > 1:
        pairs = [given[i : i + 2] for i in range(0, len(given), 2)]
        given = [add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return given[0]


def together(collectives: Collectives, work: Callable[[], Result]) -> Result:
    """Return what `work` gives, if it raises nothing on any rank. Else all ranks raise, so that
    they do the same next and none waits for another."""
    try:
        result = work()
    except BaseException:
        collectives.agree(is_fine=False)
        raise
    if not collectives.agree(is_fine=True):
        raise EngineError("another rank could not compute it")
    return result


class TorchCollectives(ABC):
    """Base of `Collectives` that makes the operations on rows of `all_reduce`, by torch."""

    size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """See `Collectives.all_reduce`."""

    def sum_rows(
        self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        total = self.all_reduce(x)
        return (total if bias is None else total + bias).to(dtype)

    def look_up(
        self,
        ids: torch.Tensor,
        own: range,
        most: int,  # noqa: ARG002  each rank knows its own
        rows: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Look up as in `Collectives.look_up`: rows of other ranks are zeros in a sum."""
        local = ids - own.start
        is_own = (local >= 0) & (local < len(own))
        found = rows(torch.where(is_own, local, 0))
        return self.all_reduce(torch.where(is_own.unsqueeze(-1), found, 0))

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Norm as in `Collectives.norm_rows`: only sums of squares cross between ranks."""
        wide = x.float()
        squares = self.all_reduce(wide.square().sum(-1, keepdim=True))
        wide *= torch.rsqrt(squares / (x.shape[-1] * self.size) + eps)
        x.copy_(wide * weight.float())


class Alone(TorchCollectives):
    """`Collectives` of one rank: every result is what was given."""

    size = 1

    def all_reduce(
        self,
        x: torch.Tensor,
        op: Reduction = "sum",  # noqa: ARG002  the same for one rank
    ) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def look_up(
        self,
        ids: torch.Tensor,
        own: range,  # noqa: ARG002  all of them
        most: int,  # noqa: ARG002  the same
        rows: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        return rows(ids)

    def agree(self, *, is_fine: bool) -> bool:
        return is_fine

    def note(self, decided: bytes) -> None:
        """There is nobody to differ from."""


ALONE = Alone()

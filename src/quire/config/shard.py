"""The part of a model that one rank of a tensor-parallel group has.

Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): a projection is cut by its outputs
(column), the next one by its inputs (row), so that one sum over the ranks follows the pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.errors import ConfigError

__all__ = ["NUM_PIECES", "ONE_RANK", "Shard", "Share"]

NUM_PIECES = 8
"""Pieces of inputs whose sums do not depend on the number of ranks, if that divides it."""


@dataclass(frozen=True, slots=True)
class Share:
    """Part of one dimension of a tensor. total: size of the whole. ranges: indices that the rank
    has, in the order in which it keeps them."""

    total: int
    ranges: tuple[range, ...]

    @classmethod
    def whole(cls, total: int) -> Share:
        """All of the dimension."""
        return cls(total, (range(total),))

    @classmethod
    def joined(cls, shares: Sequence[Share]) -> Share:
        """Shares of dimensions that lie side by side in one tensor."""
        ranges, start = list[range](), 0
        for share in shares:
            ranges += [range(start + each.start, start + each.stop) for each in share.ranges]
            start += share.total
        return cls(start, tuple(ranges))

    def times(self, size: int) -> Share:
        """The share of a dimension with `size` indices for each one here."""
        ranges = (range(each.start * size, each.stop * size) for each in self.ranges)
        return Share(self.total * size, tuple(ranges))

    @property
    def count(self) -> int:
        """Indices that the rank has."""
        return sum(map(len, self.ranges))

    @property
    def is_whole(self) -> bool:
        return self.count == self.total


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` ranks that hold a model together. Raises ConfigError if there is no
    such rank."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size}: use a rank from 0 to size - 1")

    def equal(self, total: int, noun: str) -> Share:
        """An equal part of `total` things, called `noun`. Raises ConfigError if there is none."""
        if total % self.size:
            raise self._uneven(total, noun)
        count = total // self.size
        return Share(total, (range(self.rank * count, (self.rank + 1) * count),))

    def in_units(self, total: int, unit: int, noun: str) -> Share:
        """Return the most even part of `total` things that begins and ends at multiples of `unit`:
        earlier ranks may have one unit more. Raises ConfigError if a rank would have none."""
        num_units = -(-total // unit)
        if num_units < self.size:
            raise self._uneven(total, noun)
        each, more = divmod(num_units, self.size)
        first = self.rank * each + min(self.rank, more)
        past = first + each + (self.rank < more)
        return Share(total, (range(first * unit, min(past * unit, total)),))

    def kv_heads(self, total: int) -> Share:
        """An equal part of the kv heads; with fewer heads than ranks, the one head that the query
        heads of this rank read, which other ranks have too. Raises ConfigError if the heads cannot
        be shared so."""
        if total >= self.size:
            return self.equal(total, "kv heads")
        if self.size % total:
            raise self._uneven(total, "kv heads")
        head = self.rank * total // self.size
        return Share(total, (range(head, head + 1),))

    def vocabulary(self, total: int) -> Share:
        """Rows of the vocabulary: an equal number for each rank, fewer for the last one. Raises
        ConfigError if a rank would have none."""
        count = self.most_rows(total)
        first = self.rank * count
        if (self.size - 1) * count >= total:
            raise self._uneven(total, "tokens of the vocabulary")
        return Share(total, (range(first, min(first + count, total)),))

    def most_rows(self, total: int) -> int:
        """Rows of the vocabulary that a rank has memory for."""
        return -(-total // self.size)

    def _uneven(self, total: int, noun: str) -> ConfigError:
        return ConfigError(
            f"{total} {noun} cannot be shared by {self.size} ranks; use a number of ranks that "
            f"divides {total}"
        )


ONE_RANK = Shard()
"""It has all of the model."""

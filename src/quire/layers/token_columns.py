"""Facts of rows, such as the index of an adapter, where layers find those of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import EngineError
from quire.ops import OpSet

__all__ = ["TYPE_COLUMN", "TokenColumn", "TokenColumns", "Variant"]

TYPE_COLUMN = "token_type"
"""1 for tokens of the second text of a pair, else 0."""

Variant = tuple[str, ...]
"""Names of optional columns that a forward reads."""


class TokenColumn:
    """One fact for each token that a forward computes; a layer that needs it is built with it.

    is_zero: it is 0 for all tokens of the forward that is running, and `values` are not set; only
        of an optional one. apart: numbers with which layers do more than call kernels, so that no
        captured step may have them. is_apart: the forward that is running has one.
    """

    def __init__(self, name: str) -> None:
        self.is_zero = False
        self.apart: set[int] = set()
        self.is_apart = False
        self._name = name
        self._values: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        """int64 [T] of the forward that is running, [N] behind its last attention. Raises
        EngineError before the first one."""
        if self._values is None:
            raise EngineError(f"a layer read {self._name!r} before any step; this is a bug")
        return self._values

    def set(self, values: torch.Tensor) -> None:
        """values: as above."""
        self._values = values


class TokenColumns:
    """The columns that layers of a model asked for; others cost nothing.

    The input gatherer of the runner sets them for each forward, so no model file passes them on.
    """

    def __init__(self, ops: OpSet) -> None:
        self._take = ops.embedding
        self._asked: dict[str, TokenColumn] = {}
        self._optional: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of those that layers asked for: some of `KERNEL_COLUMNS`, and TYPE_COLUMN."""
        return tuple(self._asked)

    @property
    def variant(self) -> Variant:
        """The optional columns that the next forward reads: what is captured of it holds for
        forwards of the same variant."""
        return tuple(name for name in sorted(self._optional) if not self._asked[name].is_zero)

    @property
    def variants(self) -> list[Variant]:
        """All that there may be, that without optional columns first."""
        names = sorted(self._optional)
        return [each for n in range(len(names) + 1) for each in combinations(names, n)]

    def choose(self, variant: Variant) -> None:
        """Say which optional columns the next forward reads, which may be captured."""
        for name in self._optional:
            self._asked[name].is_zero = name not in variant
            self._asked[name].is_apart = False

    def choose_for(self, values: Callable[[str], npt.NDArray[np.int64]]) -> None:
        """Choose by the rows of the next forward. values: those of the rows, by name."""
        for name in self._optional:
            column, found = self._asked[name], values(name)
            column.is_zero = not found.any()
            column.is_apart = bool(column.apart) and not column.apart.isdisjoint(found.tolist())

    @property
    def are_apart(self) -> bool:
        """True if the next forward must not be captured, or replayed."""
        return any(self._asked[name].is_apart for name in self._optional)

    def column(self, name: str, *, optional: bool = False) -> TokenColumn:
        """Ask for a column, when a layer is built. optional: the layer does without it where it is
        0 for all tokens."""
        if optional and name not in self._asked:
            self._optional.add(name)
        elif not optional:
            self._optional.discard(name)
        return self._asked.setdefault(name, TokenColumn(name))

    def gather(
        self, column: Callable[[str], torch.Tensor], ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Values [T] of ids [T] out of columns, by an operation that graphs can hold. column: the
        whole of it by name, int64 [S]."""
        return {name: self._take(ids, column(name).view(-1, 1)).view(-1) for name in self.read}

    def set(self, values: Mapping[str, torch.Tensor]) -> None:
        """values: int64 [T] by name, of the tokens of the next forward."""
        for name in self.read:
            self._asked[name].set(values[name])

    @property
    def read(self) -> list[str]:
        """Columns that the next forward reads."""
        return [name for name, column in self._asked.items() if not column.is_zero]

    def select(self, wanted: torch.Tensor) -> None:
        """Continue the forward with tokens wanted [N] alone."""
        self.set(self.gather(lambda name: self._asked[name].values, wanted))

    @contextmanager
    def at(self, places: torch.Tensor | None) -> Iterator[None]:
        """Have layers see some tokens of the forward that ended last, at these places in what it
        returned, int64 [L]; None for all. A captured one has no layer that looks."""
        if places is None or not self.are_apart:
            yield
            return
        kept = {name: self._asked[name].values for name in self.read}
        self.select(places)
        yield
        self.set(kept)

"""Facts of rows, such as the index of an adapter, gathered for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import EngineError
from quire.ops import OpSet

__all__ = ["TYPE_COLUMN", "TokenColumn", "TokenColumns", "Variant"]

TYPE_COLUMN = "token_type"
"""1 for tokens of the second text of a pair, else 0."""

Variant = tuple[str, ...]
"""Names of the optional columns that a forward reads."""


class TokenColumn:
    """One fact of each token in a forward; the layers that need it are built with it.

    is_zero: it is 0 for all tokens of the running forward, and `values` are not set; only for
    optional columns. apart: values with which layers do more than call kernels, so that such a step
    cannot be captured. is_apart: the running forward has one of these values.
    """

    def __init__(self, name: str) -> None:
        self.is_zero = False
        self.apart: set[int] = set()
        self.is_apart = False
        self._name = name
        self._values: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        """int64 [T] of the running forward, [N] behind its last attention. Raises EngineError
        before the first one."""
        if self._values is None:
            raise EngineError(f"a layer read {self._name!r} before any step; this is a bug")
        return self._values

    def set(self, values: torch.Tensor) -> None:
        """Set them. values: int64, as above."""
        self._values = values


class TokenColumns:
    """The columns that the model's layers asked for; others cost nothing.

    The runner sets them for each forward, so model files pass nothing on.
    """

    def __init__(self, ops: OpSet) -> None:
        self._take = ops.embedding
        self._asked: dict[str, TokenColumn] = {}
        self._optional: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the requested columns: some of `KERNEL_COLUMNS`, and TYPE_COLUMN."""
        return tuple(self._asked)

    @property
    def variant(self) -> Variant:
        """The optional columns that the next forward reads. A captured graph serves forwards of the
        same variant."""
        return tuple(name for name in sorted(self._optional) if not self._asked[name].is_zero)

    @property
    def variants(self) -> list[Variant]:
        """All possible variants; the one without optional columns comes first."""
        names = sorted(self._optional)
        return [each for n in range(len(names) + 1) for each in combinations(names, n)]

    def choose(self, variant: Variant) -> None:
        """Set which optional columns the next forward reads."""
        for name in self._optional:
            self._asked[name].is_zero = name not in variant
            self._asked[name].is_apart = False

    def choose_for(self, values: Callable[[str], npt.NDArray[np.int64]]) -> None:
        """Choose by the rows of the next forward. values: returns a column of the rows, by name."""
        for name in self._optional:
            column, found = self._asked[name], values(name)
            column.is_zero = not found.any()
            column.is_apart = bool(column.apart) and not column.apart.isdisjoint(found.tolist())

    @property
    def are_apart(self) -> bool:
        """True if the next forward must be neither captured nor replayed."""
        return any(self._asked[name].is_apart for name in self._optional)

    def column(self, name: str, *, optional: bool = False) -> TokenColumn:
        """Ask for a column while a layer is built. optional: the layer needs no values where all
        are 0."""
        if optional and name not in self._asked:
            self._optional.add(name)
        elif not optional:
            self._optional.discard(name)
        return self._asked.setdefault(name, TokenColumn(name))

    def gather(
        self, column: Callable[[str], torch.Tensor], ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return values [T] of ids [T] by an operation that graphs can capture. column: returns a
        whole column by name, int64 [S]."""
        return {name: self._take(ids, column(name).view(-1, 1)).view(-1) for name in self.read}

    def set(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the columns of the next forward. values: int64 [T] by name."""
        for name in self.read:
            self._asked[name].set(values[name])

    @property
    def read(self) -> list[str]:
        """Columns that the next forward reads."""
        return [name for name, column in self._asked.items() if not column.is_zero]

    def select(self, wanted: torch.Tensor) -> None:
        """Continue the forward with the tokens `wanted` [N] alone."""
        self.set(self.gather(lambda name: self._asked[name].values, wanted))

    @contextmanager
    def at(self, places: torch.Tensor | None) -> Iterator[None]:
        """Show layers some tokens of the last forward, at these places of its output, int64 [L];
        None for all. A captured forward has no such layer."""
        if places is None or not self.are_apart:
            yield
            return
        kept = {name: self._asked[name].values for name in self.read}
        self.select(places)
        yield
        self.set(kept)

"""`Collectives` over shared memory by C++ kernels."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable

import torch

from quire.base.errors import EngineError, EngineLostError
from quire.base.platform.shared_region import SharedRegion
from quire.ops.distributed import Collectives, PlainCollectives, Reduction
from quire.ops.distributed.plain import PEER_FAILED, drifted, lost
from quire.ops.native.binding import NativeLibrary, load_native
from quire.ops.native.cpu_provider import DTYPE_CODES, isa_of, row_ids, row_norm_arguments
from quire.ops.native.team import Team

__all__ = ["NativeCollectives", "join_region"]

_CODES = {**DTYPE_CODES, torch.int32: 3}
_OPS = {"sum": 0, "max": 1}


def join_region(region: SharedRegion, rank: int, kernels: str, team: Team) -> Collectives:
    """Return the collectives of a rank. kernels: the provider of the model's layers; its
    collectives are kernels too, so that steps can be captured."""
    isa = isa_of(kernels)
    if isa is None:
        return PlainCollectives(region, rank)
    return NativeCollectives(region, rank, load_native(isa, team))


class NativeCollectives:
    """`Collectives` of one rank of a region."""

    def __init__(self, region: SharedRegion, rank: int, library: NativeLibrary) -> None:
        self.size = region.size
        self._region = region  # keeps the memory alive
        self._place = (region.address, rank)
        self._library = library
        self._all_fine = ctypes.c_int32()
        self._mark = 0

    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.numel():
            code = _CODES[x.dtype]
            self._call(
                "all_reduce", x.data_ptr(), out.data_ptr(), x.numel(), code, _OPS[op], None, 1, code
            )
        return out

    def sum_rows(
        self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=dtype)
        if x.numel():
            self._call(
                "all_reduce",
                x.data_ptr(),
                out.data_ptr(),
                x.numel(),
                _CODES[x.dtype],
                _OPS["sum"],
                None if bias is None else bias.data_ptr(),
                x.shape[-1],
                _CODES[dtype],
            )
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        out = torch.empty((*x.shape[:-1], self.size * width), dtype=x.dtype)
        if x.numel():
            row_bytes = width * x.itemsize
            self._call("all_gather", x.data_ptr(), out.data_ptr(), x.numel() // width, row_bytes)
        return out

    def look_up(
        self,
        ids: torch.Tensor,
        own: range,
        most: int,
        rows: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ids = row_ids(ids)
        local = torch.empty(ids.shape, dtype=torch.int32)
        pointers = (ids.data_ptr(), ids.itemsize)
        self._library.call("own_ids", *pointers, own.start, len(own), local.data_ptr(), ids.numel())
        found = rows(local).contiguous()
        out = torch.empty_like(found)
        if found.numel():
            row_bytes = found.shape[-1] * found.itemsize
            sizes = (ids.numel(), row_bytes)
            self._call("owned_rows", found.data_ptr(), *pointers, most, out.data_ptr(), *sizes)
        return out

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        arguments = row_norm_arguments(x, weight, eps)
        if x.numel():
            self._call("norm_shared_rows", *arguments)

    def draw(
        self,
        own: range,
        total: int,
        logits: torch.Tensor,
        rows: torch.Tensor,
        *columns: torch.Tensor,
    ) -> torch.Tensor:
        """Draw like the operation `draw` without masks, from logits of which each rank has a part:
        token ids int32 [R]. logits: this rank's, float32 [N, most], the tokens `own` of `total`.
        rows: int64 [R]. columns: its other arguments in their order, the positions last."""
        token_ids = torch.empty_like(rows, dtype=torch.int32)
        self._call(
            "draw_ranks",
            logits.data_ptr(),
            logits.stride(0),
            own.start,
            len(own),
            logits.shape[1],
            total,
            rows.data_ptr(),
            len(rows),
            *(column.data_ptr() for column in columns),
            token_ids.data_ptr(),
        )
        return token_ids

    def agree(self, *, is_fine: bool) -> bool:
        try:
            mark = ctypes.c_int32(self._mark).value
            self._call("agree", int(is_fine), mark, ctypes.addressof(self._all_fine))
        except EngineLostError:
            raise
        except EngineError as error:  # nothing else ends an agreement
            raise drifted() from error
        return bool(self._all_fine.value)

    def note(self, decided: bytes) -> None:
        self._mark = zlib.crc32(decided, self._mark)

    def _call(self, name: str, *arguments: object) -> None:
        try:
            self._library.call(name, *self._place, *arguments)
        except EngineError as error:
            if self._region.is_aborted:
                raise lost() from error
            if self._region.failed:
                raise EngineError(PEER_FAILED) from error
            raise

"""Adapters in host memory, and in the slots from which steps read them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from quire.config.adapters import AdapterFolder, digest_of, read_adapter
from quire.errors import ConfigError, RequestError
from quire.layers.adapted import AdaptedLayers
from quire.models import CausalLM
from quire.ops.linear.low_rank import LowRankTables
from quire.protocol.adapters import AdapterRef

__all__ = ["AdapterBank", "HostAdapter"]


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Matrices of one module. a: [r, I]; b: [O, r], both of the model's dtype."""

    module: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter that was read and checked against the model."""

    ref: AdapterRef
    matrices: tuple[_Matrices, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    tables: LowRankTables
    part: int


class AdapterBank:
    """Reads adapters, keeps the last ones in host memory, and fills slots with them.

    `read` may be called in any thread, beside steps; all else between steps.
    """

    def __init__(
        self, model: CausalLM, layers: AdaptedLayers, dtype: torch.dtype, max_in_host: int
    ) -> None:
        """max_in_host: adapters that are kept, those in slots included."""
        self._dtype = dtype
        self._max_in_host = max_in_host
        self._lock = threading.Lock()
        self._in_host: OrderedDict[str, HostAdapter] = OrderedDict()
        self._in_slots: dict[int, HostAdapter] = {}
        self.serve(model, layers)

    def serve(self, model: CausalLM, layers: AdaptedLayers) -> None:
        """Go on with a model that was loaded anew: slots keep their adapters."""
        self._layers = layers
        self._places: dict[str, _Place | None] = {}
        names = model.weight_map
        for name, target in names.targets(model).items():
            module, _, kind = name.rpartition(".")
            if kind != "weight":
                continue
            found = layers.find(target.weights, target.part)
            self._places[module] = None if found is None else _Place(*found)
        self._prefix = names.prefix
        for slot, adapter in self._in_slots.items():
            self._fill(slot, adapter)

    def read(self, ref: AdapterRef) -> HostAdapter:
        """Return the adapter, from its folder unless it is kept. RequestError for one that cannot
        be read, does not fit this model, or was changed since the request named it."""
        with self._lock:
            kept = self._in_host.get(ref.digest)
            if kept is not None:
                self._in_host.move_to_end(ref.digest)
                return kept
        try:
            adapter = self._read(ref)
        except ConfigError as error:
            raise RequestError(f"the adapter {ref.name!r} cannot be used: {error}") from error
        with self._lock:
            self._in_host[ref.digest] = adapter
            while len(self._in_host) > self._max_in_host:
                self._in_host.popitem(last=False)
        return adapter

    def put(self, slot: int, adapter: HostAdapter) -> None:
        """Fill a slot, from 0 on, that no row uses."""
        self._in_slots[slot] = adapter
        self._fill(slot, adapter)

    def _fill(self, slot: int, adapter: HostAdapter) -> None:
        self._layers.clear(slot)
        for each in adapter.matrices:
            place = self._places[each.module]
            assert place is not None
            place.tables.put(slot, place.part, each.a, each.b, each.scale)

    def _read(self, ref: AdapterRef) -> HostAdapter:
        folder = Path(ref.path)
        found = read_adapter(folder, self._layers.max_rank)
        modules = {name: self._name_of(name) for name in found.modules}
        self._check(found, modules)
        matrices = tuple(self._matrices(found, modules))
        if digest_of(folder) != ref.digest:
            raise ConfigError(f"{folder}: its files were changed meanwhile; load it again")
        return HostAdapter(ref, matrices)

    def _name_of(self, module: str) -> str:
        """The module as the model's weights name it; some adapters leave the prefix out."""
        return module if module in self._places else self._prefix + module

    def _check(self, found: AdapterFolder, modules: dict[str, str]) -> None:
        for name, module in modules.items():
            if module not in self._places:
                raise ConfigError(
                    f"{found.folder}: it changes {name!r}, which this model has not: the adapter "
                    f"is of another base model ({found.base or 'it does not say which'})"
                )
            place, pair = self._places[module], found.modules[name]
            if place is None:
                raise ConfigError(
                    f"{found.folder}: it changes {name!r}, which adapters cannot change here; "
                    "train it on projections of the blocks, or merge it into the model"
                )
            shape = pair.b.shape[0], pair.a.shape[1]
            wanted = place.tables.parts[place.part], place.tables.a.shape[-1]
            if shape != wanted:
                raise ConfigError(
                    f"{found.folder}: {name!r} has {shape[1]} inputs and {shape[0]} outputs, but "
                    f"{wanted[1]} and {wanted[0]} in this model: the adapter is of another base "
                    f"model ({found.base or 'it does not say which'})"
                )

    def _matrices(self, found: AdapterFolder, modules: dict[str, str]) -> Iterable[_Matrices]:
        (file,) = {pair.a.file for pair in found.modules.values()}
        with safe_open(file, framework="pt") as opened:
            for name, pair in found.modules.items():
                a, b = (opened.get_tensor(side.name).to(self._dtype) for side in (pair.a, pair.b))
                if not (a.isfinite().all() and b.isfinite().all()):
                    raise ConfigError(
                        f"{file}: the matrices of {name!r} hold numbers that are not finite in "
                        f"{str(self._dtype).removeprefix('torch.')}; save the adapter again"
                    )
                yield _Matrices(modules[name], a, b, pair.scale)

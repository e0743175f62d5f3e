"""Adapters in host memory, and in the slots from which steps read them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from quire.base.errors import ConfigError, RequestError
from quire.compute.layers.adapted import AdaptedLayers
from quire.compute.lora.fit import AdapterTensors, FittedAdapter, ModelPlaces, ModelShapes
from quire.compute.models import CausalLM
from quire.config.adapters import WEIGHTS_NAME, digest_of, read_adapter
from quire.protocol.adapters import AdapterRef

__all__ = ["AdapterBank", "HostAdapter"]


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter that was read and checked against the model."""

    ref: AdapterRef
    tensors: AdapterTensors


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
        self._layers: AdaptedLayers | None = None
        self._places: ModelPlaces | None = None
        self.serve(model, layers)

    def serve(self, model: CausalLM, layers: AdaptedLayers) -> None:
        """Go on with a model whose weights are there again: slots have their adapters."""
        places = ModelPlaces(model, layers)
        for slot, adapter in self._in_slots.items():
            _fill(layers, places, slot, adapter)
        self._shapes, self._max_rank = ModelShapes(places), layers.max_rank
        self._layers, self._places = layers, places

    def let_go(self) -> None:
        """Keep nothing of the model alive, whose weights go. Slots are filled by `serve`."""
        self._layers = self._places = None

    @property
    def is_serving(self) -> bool:
        """False between `let_go` and `serve`."""
        return self._layers is not None

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
        """Fill a slot, from 0 on, that no row uses; when the model is served again if it is not."""
        if self._layers is not None and self._places is not None:
            _fill(self._layers, self._places, slot, adapter)
        self._in_slots[slot] = adapter

    def _read(self, ref: AdapterRef) -> HostAdapter:
        folder = Path(ref.path)
        found = read_adapter(folder, self._max_rank)
        fit = FittedAdapter(found, self._shapes)
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as opened:
            adapter = HostAdapter(ref, fit.read(opened, self._dtype))
        if digest_of(folder) != ref.digest:
            raise ConfigError(f"{folder}: its files were changed meanwhile; load it again")
        return adapter


def _fill(layers: AdaptedLayers, places: ModelPlaces, slot: int, adapter: HostAdapter) -> None:
    tensors = adapter.tensors
    layers.clear(slot)
    is_apart = bool(tensors.tables or tensors.whole or tensors.biases or tensors.rows)
    for module, matrices in tensors.matrices.items():
        place = places.projections[module]
        assert place is not None, "it was checked"
        place.put(slot, matrices)
        is_apart |= place.is_apart
    for module, matrices in tensors.tables.items():
        places.tables[module].put(slot, matrices)
    for module, weight in tensors.whole.items():
        places.whole[module].replace(slot, weight)
    for module, rows in tensors.rows.items():
        places.whole[module].renew(slot, rows)
    for module, bias in tensors.biases.items():
        place = places.biases[module]
        assert place is not None, "it was checked"
        place.put(slot, bias)
    layers.set_apart(slot, is_apart=is_apart)

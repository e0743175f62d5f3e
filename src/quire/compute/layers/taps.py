"""Keeps hidden states between layers, for heads that make drafts from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["StateTaps"]


class StateTaps:
    """States of the residual stream at the inputs of some layers, for all tokens of the last
    forward.

    layers: indices of the layers, in the order of `take`.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._found: dict[int, torch.Tensor] = {}

    def note(self, layer: int, state: torch.Tensor) -> None:
        """Note the state [T, E] that enters a layer; it is kept if the layer is one of `layers`."""
        if layer in self.layers:
            self._found[layer] = state

    def put(self, states: Sequence[torch.Tensor]) -> None:
        """Set the states of a forward that was replayed, in the order of `layers`."""
        self._found = dict(zip(self.layers, states, strict=True))

    def take(self) -> tuple[torch.Tensor, ...]:
        """Return the states [T, E], in the order of `layers`, and release them."""
        found, self._found = self._found, {}
        return tuple(found[layer] for layer in self.layers)

"""Keeps hidden states between layers, for heads that guess tokens from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["StateTaps"]


class StateTaps:
    """States of the residual stream as they enter some layers, of all tokens of the forward that
    ran last.

    layers: in the order in which `take` gives their states.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._found: dict[int, torch.Tensor] = {}

    def note(self, layer: int, state: torch.Tensor) -> None:
        """state [T, E] enters a layer; kept if it is one of `layers`."""
        if layer in self.layers:
            self._found[layer] = state

    def put(self, states: Sequence[torch.Tensor]) -> None:
        """Give the states of a forward that was replayed, by `layers`."""
        self._found = dict(zip(self.layers, states, strict=True))

    def take(self) -> tuple[torch.Tensor, ...]:
        """Return the states [T, E], by `layers`, and let go of them."""
        found, self._found = self._found, {}
        return tuple(found[layer] for layer in self.layers)

"""Layers that keep a recurrent state of each sequence in place of K and V."""

from quire.layers.recurrent.gated_delta import DeltaShares, GatedDelta
from quire.layers.recurrent.make import RecurrentLayers

__all__ = ["DeltaShares", "GatedDelta", "RecurrentLayers"]

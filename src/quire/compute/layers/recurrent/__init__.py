"""Layers that keep a recurrent state of each sequence in place of K and V."""

from quire.compute.layers.recurrent.make import Parts, RecurrentLayers

__all__ = ["Parts", "RecurrentLayers"]

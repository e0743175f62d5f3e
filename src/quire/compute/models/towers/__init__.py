"""Encoders of images, one file for each lineage. `tower.py` says what they have in common."""

from quire.compute.models.towers.tower import ImageTower, find_tower

__all__ = ["ImageTower", "find_tower"]

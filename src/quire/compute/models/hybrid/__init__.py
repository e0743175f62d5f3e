"""Models that attend in some layers, and keep recurrent states in the others."""

from quire.compute.models.hybrid.lfm2 import LFM2Model
from quire.compute.models.hybrid.qwen3_next import Qwen3NextModel
from quire.compute.models.hybrid.ssd import SSDModel

__all__ = ["LFM2Model", "Qwen3NextModel", "SSDModel"]

"""Models that attend in some layers, and keep recurrent states in the others."""

from quire.models.hybrid.lfm2 import LFM2Model
from quire.models.hybrid.qwen3_next import Qwen3NextModel
from quire.models.hybrid.ssd import SSDModel

__all__ = ["LFM2Model", "Qwen3NextModel", "SSDModel"]

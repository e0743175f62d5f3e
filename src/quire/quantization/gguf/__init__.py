"""GGUF weights, by rows."""

from quire.config.packed.gguf.read import DEQUANTIZE, dequantize
from quire.quantization.gguf.reader import GGUFReader

__all__ = ["DEQUANTIZE", "GGUFReader", "dequantize"]

"""GGUF weights, by rows."""

from quire.compute.quantization.gguf.reader import GGUFReader
from quire.config.packed.gguf.read import DEQUANTIZE, dequantize

__all__ = ["DEQUANTIZE", "GGUFReader", "dequantize"]

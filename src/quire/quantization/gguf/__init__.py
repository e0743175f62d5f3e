"""GGUF weights: what the bits of each type mean, and a reader that yields them by rows."""

from quire.quantization.gguf.reader import GGUFReader
from quire.quantization.gguf.tensor_types import DEQUANTIZE, dequantize

__all__ = ["DEQUANTIZE", "GGUFReader", "dequantize"]

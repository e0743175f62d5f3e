"""Formats in which the matrices of a model are kept, and how plain weights become them."""

from quire.compute.quantization.formats import MatrixFormats, QuantizedFormats
from quire.compute.quantization.int4 import Int4Format, quantize_int4
from quire.compute.quantization.int8 import Int8Format, quantize_int8
from quire.compute.quantization.packed import StoredMatrix, numbers_of
from quire.compute.quantization.plain import PlainFormat
from quire.compute.quantization.weight_format import (
    CutFormat,
    CuttableFormat,
    WeightFormat,
    WidensStored,
)

__all__ = [
    "CutFormat",
    "CuttableFormat",
    "Int4Format",
    "Int8Format",
    "MatrixFormats",
    "PlainFormat",
    "QuantizedFormats",
    "StoredMatrix",
    "WeightFormat",
    "WidensStored",
    "numbers_of",
    "quantize_int4",
    "quantize_int8",
]

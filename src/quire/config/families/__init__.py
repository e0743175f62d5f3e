"""Model families. Each is declared once, as a `Family`, in the file of its lineage.

A family of a new lineage has a file of its own, and a line in `FAMILIES`. `reader.py` reads a
checkpoint by the reader of its family.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quire.config.families import (
    centered,
    cohere,
    deepseek,
    encoders,
    experts,
    gemma,
    gemma4,
    gpt,
    lfm2,
    llama,
    mamba,
    mpt,
    qwen3_next,
)
from quire.config.families.family import Family, SpecReader

__all__ = [
    "ARCHITECTURE_OF_TYPE",
    "FAMILIES",
    "READERS",
    "SUPPORTED_ARCHITECTURES",
    "Family",
    "SpecReader",
]

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *cohere.FAMILIES,
    *gemma.FAMILIES,
    *gemma4.FAMILIES,
    *centered.FAMILIES,
    *experts.FAMILIES,
    *deepseek.FAMILIES,
    *lfm2.FAMILIES,
    *qwen3_next.FAMILIES,
    *mamba.FAMILIES,
    *mpt.FAMILIES,
    *gpt.FAMILIES,
    *encoders.FAMILIES,
)
"""All families, in the order of the docs."""

READERS: Mapping[str, SpecReader] = MappingProxyType(
    {name: read for family in FAMILIES for name, read in family.readers.items()}
)
"""Readers of config.json, by architecture."""

ARCHITECTURE_OF_TYPE: Mapping[str, str] = MappingProxyType(
    {
        kind: family.architecture
        for family in FAMILIES
        for kind in (family.model_type, *family.text_names)
    }
)
"""Architecture of the text model of each `model_type`."""

SUPPORTED_ARCHITECTURES = tuple(sorted(READERS))

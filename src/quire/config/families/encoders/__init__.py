"""Families of encoders, which draw no tokens, and heads for classes, which decoders have too."""

from quire.config.families.encoders import bert, modernbert
from quire.config.families.family import Family

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = (*bert.FAMILIES, *modernbert.FAMILIES)

"""Families of encoders, which make vectors and classes and draw no tokens."""

from quire.config.families.encoders import bert, modernbert
from quire.config.families.family import Family

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = (*bert.FAMILIES, *modernbert.FAMILIES)

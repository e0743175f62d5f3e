"""Models of `transformers` over quire's paged attention, for architectures without a file of their
own. Only who runs one imports `transformers`."""

from quire.compute.models.generic.model import load_generic

__all__ = ["load_generic"]

"""Declaration of a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.families.gguf_names import GGUFNames
from quire.config.hf import RawConfig
from quire.config.model_spec import ModelSpec

__all__ = ["Family", "SpecReader", "without_head"]

SpecReader = Callable[[RawConfig, str], ModelSpec]
"""Reader of config.json. It takes the dtype of the weights too."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. The registries, the tables in the docs and the names in GGUF files follow
    from it.

    title: name in the docs.
    model: "module:class", imported when a model of the family loads.
    model_type: value in config.json that names the family where `architectures` is missing.
    readers: reader for each architecture; the first belongs to `model_type`.
    gguf: names in GGUF files; None if quire reads no such files of the family.
    text_defaults: values that `text_config` of a model with more parts leaves out; None if quire
    does not read the family from such a part. text_names: other values of `model_type` under which
    such parts are of this family, with the values that they leave out.
    """

    title: str
    model: str
    model_type: str
    readers: Mapping[str, SpecReader]
    gguf: GGUFNames | None = None
    text_defaults: Mapping[str, Any] | None = None
    text_names: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict[str, Mapping[str, Any]]
    )

    @property
    def architecture(self) -> str:
        """The architecture that `model_type` stands for."""
        return next(iter(self.readers))


def without_head(read: SpecReader) -> SpecReader:
    """Return the reader of a family's decoders that are saved without the head for logits, as
    sentence-transformers saves them."""
    return lambda raw, dtype: read(raw, dtype).without_head()

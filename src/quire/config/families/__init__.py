"""Readers of config.json, one file per lineage of model families."""

from quire.config.families.reader import (
    SUPPORTED_ARCHITECTURES,
    SpecReader,
    flat_config,
    read_model_spec,
)

__all__ = ["SUPPORTED_ARCHITECTURES", "SpecReader", "flat_config", "read_model_spec"]

"""Folders of adapters, read without their tensors' bytes. Never imports torch."""

from quire.config.adapters.peft import (
    WEIGHTS_NAME,
    AdapterFolder,
    LowRankPair,
    digest_of,
    read_adapter,
)
from quire.config.adapters.registry import AdapterFolders, named

__all__ = [
    "WEIGHTS_NAME",
    "AdapterFolder",
    "AdapterFolders",
    "LowRankPair",
    "digest_of",
    "named",
    "read_adapter",
]

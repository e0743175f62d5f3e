"""Formats of quantized checkpoints, and the quantization settings of a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from quire.base.errors import ConfigError
from quire.config.hf import RawConfig, read_json
from quire.config.packed.auto_round.scheme import FORMAT as AUTO_ROUND
from quire.config.packed.awq.scheme import FORMAT as AWQ
from quire.config.packed.bitsandbytes.scheme import FORMAT as BITSANDBYTES
from quire.config.packed.compressed_tensors.scheme import FORMAT as COMPRESSED_TENSORS
from quire.config.packed.float8.scheme import FORMAT as FLOAT8
from quire.config.packed.format import Format, PackedSettings
from quire.config.packed.gguf.scheme import FORMAT as GGUF
from quire.config.packed.gptq.scheme import FORMAT as GPTQ
from quire.config.packed.mxfp4.scheme import FORMAT as MXFP4
from quire.config.packed.squeezellm.scheme import FORMAT as SQUEEZELLM

__all__ = ["FORMATS", "MARKS", "METHODS", "read_packed_settings"]

FORMATS: tuple[Format, ...] = (
    GPTQ,
    AWQ,
    AUTO_ROUND,
    COMPRESSED_TENSORS,
    FLOAT8,
    MXFP4,
    BITSANDBYTES,
    SQUEEZELLM,
    GGUF,
)
"""All formats. Of files beside config.json, the first format's counts."""

METHODS: Mapping[str, Callable[[RawConfig], PackedSettings]] = MappingProxyType(
    dict(sorted((name, read) for each in FORMATS for name, read in each.methods.items()))
)
"""Readers by `quant_method`."""

MARKS = tuple({mark: None for each in FORMATS for mark in each.marks})
"""Ends of names that only tensors of quantized matrices have."""


def read_packed_settings(folder: Path) -> PackedSettings | None:
    """Read the settings in config.json, or in the files beside it that older tools wrote; None if
    the folder's weights are plain.

    Raises ConfigError, naming file, key and value, for a format that quire does not read.
    """
    raw = _find(folder)
    if raw is None:
        return None
    method = raw.read(str, "quant_method", default="not stated").lower()
    reader = METHODS.get(method)
    if reader is None:
        known = ", ".join(METHODS)
        raise ConfigError(
            f"{raw.source}: quant_method={method!r} is not supported; quire reads {known}: use a "
            "checkpoint of the same model in one of these, or without quantization"
        )
    return reader(raw)


def _find(folder: Path) -> RawConfig | None:
    path = folder / "config.json"
    if path.is_file():
        config = read_json(path)
        section = config.section("quantization_config")
        if section is not None:
            return section
    for name, method in ((n, m) for each in FORMATS for n, m in each.files_beside.items()):
        if (folder / name).is_file():
            raw = read_json(folder / name)
            return raw.with_defaults({"quant_method": method})
    return None

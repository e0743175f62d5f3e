"""AutoRound: matrices as GPTQ or AWQ pack them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from quire.config.hf import RawConfig
from quire.config.packed.awq.scheme import read_awq
from quire.config.packed.format import (
    Format,
    PackedSettings,
    SchemeRule,
    compile_pattern,
    read_group_size,
    refused,
)
from quire.config.packed.gptq.scheme import GPTQ, read_gptq, read_gptq_bits
from quire.config.packed.scheme import Scheme

__all__ = ["FORMAT"]

_AUTO_ROUND = (
    "auto_round",
    "auto_round:auto_awq",
    "auto_round:auto_gptq",
    "auto_round:awq",
    "auto_round:gptq",
    "auto_round:gptqmodel",
)
"""Packings of AutoRound that are those of AWQ and GPTQ. Without a name, and as gptqmodel has them,
zero points are stored as they are."""


def read_auto_round(raw: RawConfig) -> PackedSettings:
    """AutoRound: matrices as GPTQ or AWQ pack them. `extra_config`: settings of their own by name
    or pattern; those of 16 bits are plain, which what is stored shows."""
    packing = raw.read_choice(_AUTO_ROUND, "packing_format", default="auto_round:auto_gptq")
    _refuse_other_numbers(raw)
    if "awq" in packing:
        plain = read_awq(RawConfig({**raw.as_dict(), "version": "gemm"}, raw.source))
    else:
        first = packing.endswith("gptq")
        layout = "gptq" if first else "gptq_v2"
        plain = read_gptq(RawConfig({**raw.as_dict(), "checkpoint_format": layout}, raw.source))
    return replace(plain, rules=(*_auto_round_rules(raw, plain.default), *plain.rules))


def _auto_round_rules(raw: RawConfig, default: Scheme) -> Iterator[SchemeRule]:
    modules = raw.section("extra_config")
    for name in modules or ():
        own = None if modules is None else modules.section(name)
        if own is None or own.read(int, "bits", default=4) >= 16:
            continue
        _refuse_other_numbers(own)
        if isinstance(default, GPTQ):
            scheme: Scheme = replace(
                default,
                bits=read_gptq_bits(own, default.bits),
                group_size=read_group_size(own, "group_size", default=default.group_size),
                symmetric=own.read(bool, "sym", default=default.symmetric),
            )
        else:
            whole = {**raw.as_dict(), **own.as_dict(), "version": "gemm"}
            scheme = read_awq(RawConfig(whole, own.source)).default
        is_name = re.fullmatch(r"[\w.]+", name) is not None
        text = f"{re.escape(name)}$" if is_name else f".*(?:{name})"
        yield SchemeRule(compile_pattern(raw, text), scheme)


def _refuse_other_numbers(raw: RawConfig) -> None:
    """Raise ConfigError for weights that are no integers, and for activations of few bits."""
    raw.read_choice(("int",), "data_type", default="int")
    bits = raw.read(int, "act_bits", default=16)
    if bits < 16:
        raise refused(raw, "act_bits", bits, "use a checkpoint whose activations have 16")


FORMAT = Format(
    methods={"auto-round": read_auto_round, "intel/auto-round": read_auto_round},
)

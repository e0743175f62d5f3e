"""Providers written in Triton. They are loaded when they are chosen, so Triton is imported only
then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from quire.base.platform import Platform
from quire.config import env
from quire.ops.native.team import ALONE, Team
from quire.ops.operation import FOR_GPUS, Provider, Tolerance

__all__ = ["MIN_CAPABILITY", "triton_provider", "triton_unavailable"]

MIN_CAPABILITY = (8, 0)
"""NVIDIA architectures before SM 80 have no bfloat16 and no asynchronous copies."""


def triton_provider(
    target: str,
    tolerance: Mapping[torch.dtype, Tolerance] | None = None,
    lacks: frozenset[str] = frozenset(),
) -> Provider:
    """Return the provider `triton` over a function named as `module:function`."""
    return Provider("triton", triton_unavailable, partial(_load, target), tolerance, lacks)


def triton_unavailable(platform: Platform) -> str | None:
    """Return why kernels in Triton cannot run here, or None if they can.

    On a CPU they run in Triton's interpreter, for tests, if TRITON_INTERPRET=1 is set.
    """
    if platform.device == "cpu" and not env.triton_interpreter():
        return FOR_GPUS
    if find_spec("triton") is None:
        return "triton is not installed"
    if platform.device == "cpu":
        return None
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"the GPU is SM {capability[0]}{capability[1]}, older than SM 80"
    return None


def _load(target: str, team: Team = ALONE) -> Callable[..., Any]:  # noqa: ARG001  no threads here
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)

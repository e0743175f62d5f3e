"""Architecture name to model class, imported only when asked for.

A third party adds an architecture with an entry point of the group `quire.models` that names a
`ModelFactory`, next to one of the group `quire.model_specs` that reads its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

import torch

from quire.base.errors import ConfigError, QuireError
from quire.base.platform.interrupts import is_ctrl_c
from quire.compute.layers import LayerFactory
from quire.compute.models.causal_lm import CausalLM, ModelFactory
from quire.config.families import FAMILIES
from quire.config.model_spec import ModelSpec

__all__ = ["ARCHITECTURES", "find_model"]

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {name: family.model for family in FAMILIES for name in family.readers}
)
"""Place of the model class, as "module:class", by architecture."""


def find_model(architecture: str) -> ModelFactory:
    """Return the factory of the model. Raises ConfigError listing the supported names for an
    unknown one."""
    place = ARCHITECTURES.get(architecture)
    if place is not None:
        module, _, name = place.partition(":")
        return getattr(import_module(module), name)
    third_party = {point.name: point for point in entry_points(group="quire.models")}
    if architecture in third_party:
        return partial(_made_by_others, architecture, third_party[architecture])
    known = ", ".join(sorted({*ARCHITECTURES, *third_party}))
    raise ConfigError(
        f"architecture {architecture!r} is not supported: its config.json is read, but there is no "
        f"model in quire.compute.models.registry or the entry points quire.models; "
        f"quire serves {known}"
    )


def _made_by_others(
    architecture: str, point: EntryPoint, spec: ModelSpec, factory: LayerFactory
) -> CausalLM:
    """Make a model of somebody's package. ConfigError with its words for whatever it raises."""
    try:
        return point.load()(spec, factory)
    except (QuireError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(
            f"the model of architecture {architecture!r} ({point.value}) failed ({error!r}): mend "
            "its package, or leave it out"
        ) from error

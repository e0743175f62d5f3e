"""The repeated layers of a model of `transformers`."""

from __future__ import annotations

from torch import nn

from quire.errors import ConfigError

__all__ = ["decoder_layers"]


def decoder_layers(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """The layers of the text model in their order, by their number. Raises ConfigError if no part
    of `model` has so many."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # pyright: ignore
    for part in decoder.modules():
        if isinstance(part, nn.ModuleList) and len(part) == num_layers:
            return list(part)
    raise ConfigError(f"{type(model).__name__} has no list of {num_layers} layers")

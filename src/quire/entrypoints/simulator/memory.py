"""Room for KV blocks on devices that are not at hand."""

from __future__ import annotations

from quire.base.errors import ConfigError
from quire.entrypoints.simulator.step_cost import StepCost
from quire.entrypoints.simulator.system import layout_of

__all__ = ["UTILIZATION", "num_kv_blocks", "weights_fit"]

UTILIZATION = 0.9
"""Share of a device's memory that the engine takes."""


def weights_fit(cost: StepCost) -> bool:
    """Return whether the devices have room for the weights and at least one block."""
    return _blocks(cost) > 0


def num_kv_blocks(cost: StepCost) -> int:
    """KV blocks beside the weights on `cost.num_devices` devices, which hold equal parts of each.
    ConfigError if there is no room for any."""
    blocks = _blocks(cost)
    if blocks < 1:
        device, count = cost.device, cost.num_devices
        raise ConfigError(
            f"The weights take {cost.weight_bytes() / 1e9:.1f} GB, which leaves no KV block on "
            f"{count} x {device.title}: take more devices or larger ones"
        )
    return blocks


def _blocks(cost: StepCost) -> int:
    room = cost.num_devices * cost.device.memory_bytes * UTILIZATION - cost.weight_bytes()
    spec = cost.spec
    as_dtype = spec.kv_elements * spec.dtype_bytes
    share = cost.kv_bytes_per_token / as_dtype  # of a cache in fewer bits
    page = layout_of(spec, cost.block_size or 16).page_bytes * share
    copies = max(1.0, cost.num_devices / spec.num_kv_heads)
    return int(room / (page * copies))

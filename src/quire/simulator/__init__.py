"""Serving without a model: the real scheduler and block manager over the times of a cost model."""

from quire.simulator.devices import Device, device_named, device_names
from quire.simulator.executor import SimulatedExecutor, VirtualClock
from quire.simulator.run import Served, serve
from quire.simulator.step_cost import StepCost
from quire.simulator.system import SystemShape, build_core

__all__ = [
    "Device",
    "Served",
    "SimulatedExecutor",
    "StepCost",
    "SystemShape",
    "VirtualClock",
    "build_core",
    "device_named",
    "device_names",
    "serve",
]

"""Serving without a model: the real scheduler and block manager over the times of a cost model."""

from quire.entrypoints.simulator.devices import Device, device_named, device_names
from quire.entrypoints.simulator.executor import SimulatedExecutor, VirtualClock
from quire.entrypoints.simulator.run import Served, serve
from quire.entrypoints.simulator.step_cost import StepCost
from quire.entrypoints.simulator.system import SystemShape, build_core

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

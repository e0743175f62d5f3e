"""The part of Ray that an engine uses: it finds room for ranks, runs a process on each of their
hosts, and reports when one ends."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import ConfigError
from quire.compute.executor.ray.host import run_host
from quire.config.memory.amounts import format_bytes

__all__ = ["HostProcess", "RayHosts", "check_nodes", "check_own_host"]

PLACE_S = 60.0
END_S = 5.0
_OFFER = "A node offers 70 % of its memory unless it was started by `ray start --memory=BYTES`"


class HostProcess:
    """The actor that runs on a host."""

    def run(self, encoded: bytes) -> str:
        """Run `run_host` and return its reason."""
        return run_host(encoded)


class RayHosts:
    """Runs processes on hosts of a Ray cluster: the one at RAY_ADDRESS, else one that runs here,
    else a new one for this engine. Make all calls in one thread."""

    def __init__(self, num_ranks: int, num_cpus: int, num_bytes: int, host_bytes: int) -> None:
        """num_ranks: ranks to place, with so many CPUs and so much memory for each. host_bytes:
        free memory on this host for all ranks here, rank 0 among them. ConfigError if there is no
        Ray, or no room."""
        self._ray = _import_ray()
        self._started_it = not self._ray.is_initialized()
        if self._started_it:
            namespace = f"quire-{secrets.token_hex(4)}"
            self._ray.init(namespace=namespace, log_to_driver=False, logging_level="WARNING")
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._group: Any = None
        try:
            check_nodes(self._ray.nodes(), num_cpus, num_bytes)
            self._place(num_ranks, num_cpus, num_bytes)
            host = self._ray.get_runtime_context().get_node_id()
            num_here = len(self.bundles.get(host, ()))
            (cpus,) = [
                node["Resources"].get("CPU", 0)
                for node in self._ray.nodes()
                if node["NodeID"] == host
            ]
            check_own_host(num_here, (num_cpus, cpus), (num_bytes, host_bytes))
        except BaseException:
            self.end()
            raise

    def _place(self, num_ranks: int, num_cpus: int, num_bytes: int) -> None:
        bundles = [{"CPU": num_cpus, "memory": num_bytes}] * num_ranks
        self._group = self._ray.util.placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(timeout_seconds=PLACE_S):
            there = self._ray.available_resources()
            memory = format_bytes(int(there.get("memory", 0)))
            raise ConfigError(
                f"Ray has not placed {num_ranks} ranks within {PLACE_S:.0f} s: each takes "
                f"num_threads={num_cpus} CPUs of one host, and {there.get('CPU', 0):g} are free in "
                f"all, and {format_bytes(num_bytes)} of its memory, of {memory}. Add hosts to the "
                "cluster, or lower tensor_parallel_size, num_threads, kv_cache_memory or "
                f"memory_utilization. {_OFFER}."
            )

    @property
    def own_address(self) -> str:
        """The address of this host in the cluster."""
        return str(self._ray.util.get_node_ip_address())

    @property
    def bundles(self) -> Mapping[str, Sequence[int]]:
        """The places on each host, by its id."""
        table = self._ray.util.placement_group_table(self._group)
        found: dict[str, list[int]] = {}
        for bundle, host in sorted(table["bundles_to_node_id"].items()):
            found.setdefault(host, []).append(int(bundle))
        return found

    def start(self, bundle: int, encoded: bytes) -> None:
        """Start the process of the host that has this place. encoded: see `run_host`."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        remote = self._ray.remote(num_cpus=1, max_restarts=0)(HostProcess)
        actor = remote.options(scheduling_strategy=strategy).remote()
        self._actors.append(actor)
        self._runs.append(actor.run.remote(encoded))

    def ended(self) -> str:
        """Return why a process has ended, in its own words or Ray's; empty while all run."""
        if not self._runs:
            return ""
        ended, _ = self._ray.wait(self._runs, num_returns=1, timeout=0.0)
        if not ended:
            return ""
        try:
            return str(self._ray.get(ended[0]))
        except self._ray.exceptions.RayError as error:
            return " ".join(str(error).split())[:300]

    def end(self) -> None:
        """End all processes and free their places."""
        if self._runs:
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=END_S)
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors, self._runs = [], []
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._started_it:
            self._ray.shutdown()
            self._started_it = False


def check_nodes(nodes: Sequence[Mapping[str, Any]], num_cpus: int, num_bytes: int) -> None:
    """Raise ConfigError if no node with so many CPUs offers so much memory, whatever else runs
    there. nodes: nodes in Ray's own format."""
    offers = [node["Resources"] for node in nodes if node["Alive"]]
    memories = [each.get("memory", 0) for each in offers if each.get("CPU", 0) >= num_cpus]
    if memories and max(memories) < num_bytes:
        raise ConfigError(
            f"a rank takes {format_bytes(num_bytes)} of memory, and no node of Ray's cluster with "
            f"num_threads={num_cpus} CPUs offers more than {format_bytes(int(max(memories)))}. "
            f"{_OFFER}: give it more, or lower kv_cache_memory or memory_utilization."
        )


def check_own_host(num_here: int, cpus: tuple[int, float], memory: tuple[int, int]) -> None:
    """Raise ConfigError if Ray has placed ranks on the CPUs or in the memory of this host that rank
    0 needs. It computes here without Ray's knowledge. num_here: ranks without it. cpus, memory:
    amount for each rank, and of this host; memory in bytes."""
    (num_cpus, all_cpus), (num_bytes, host_bytes) = cpus, memory
    placed = f"Ray has placed {num_here} ranks on this host, beside rank 0: "
    elsewhere = "Start Ray here with --num-cpus=0, so that it places ranks on other hosts, or"
    if num_here and (1 + num_here) * num_cpus > all_cpus:
        raise ConfigError(
            f"{placed}with num_threads={num_cpus} they take more than its {all_cpus:g} CPUs. "
            f"{elsewhere} lower num_threads."
        )
    if num_here and (1 + num_here) * num_bytes > host_bytes:
        raise ConfigError(
            f"{placed}each of them takes {format_bytes(num_bytes)}, and "
            f"{format_bytes(host_bytes)} are free here. {elsewhere} give a lower kv_cache_memory, "
            "which all ranks share."
        )


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"distributed_executor_backend='ray' needs Ray ({error}): install quire[ray], or leave "
            "it out for processes of this machine."
        ) from error

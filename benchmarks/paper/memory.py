"""Figures of memory: 2, 13 and 15."""

from __future__ import annotations

from itertools import product
from math import inf

from benchmarks.paper.figure import Figure, Finding, Panel, Series
from benchmarks.paper.pool import RunPool
from benchmarks.paper.runs import SETUPS, SYSTEMS, Run

__all__ = ["figure_2", "figure_13", "figure_15"]

BATCHING = ("orca-max", "orca-pow2", "orca-oracle", "quire")
SECONDS = {"sharegpt": 3600.0, "alpaca": 450.0}
"""Length of the traces of figure 13. At the paper's rate ShareGPT fills its device slowly."""

WHY_BATCHES = (
    "sequences are rate times latency: steps of the modelled A100 are shorter than the paper's, "
    "so that 2 requests/s do not fill it"
)


def figure_2(pool: RunPool) -> Figure:
    """Use of KV memory while requests wait: OPT-13B, ShareGPT."""
    runs = [Run("opt-13b", system, "sharegpt") for system in BATCHING]
    shares = [outcome.memory for outcome in pool.outcomes(runs)]
    names = tuple(SYSTEMS[system] for system in BATCHING)
    parts = {"held": "tokens", "reserved": "reserved", "internal": "internal", "free": "external"}
    series = tuple(
        Series(label, names, tuple(100 * share[part] for share in shares))
        for part, label in parts.items()
    )
    panel = Panel("KV memory while requests wait", "", "% of all slots", series, has_bars=True)
    held = dict(zip(BATCHING, (100 * share["held"] for share in shares), strict=True))
    findings = [
        Finding("tokens in KV memory, Orca (Max)", held["orca-max"], 20.4, 20.4, " %"),
        Finding("tokens in KV memory, Orca (Pow2)", held["orca-pow2"], 20.4, 38.2, " %"),
        Finding("tokens in KV memory, Orca (Oracle)", held["orca-oracle"], 38.2, 38.2, " %"),
        Finding("tokens in KV memory, quire", held["quire"], 96.0, 100.0, " %"),
    ]
    return Figure("2", "Figure 2: use of KV memory", (panel,), tuple(findings))


def figure_13(pool: RunPool) -> Figure:
    """Sequences in a step: OPT-13B at 2 requests/s of ShareGPT and 30 of Alpaca; and while all
    wait, since the paper's rates fill its device."""
    cells = (("sharegpt", 2.0), ("alpaca", 30.0), ("sharegpt", inf), ("alpaca", inf))
    runs = [
        Run("opt-13b", system, data, rate=rate, seconds=pool.seconds(SECONDS[data]))
        for (data, rate), system in product(cells, BATCHING)
    ]
    mean = {
        (run.workload, run.rate, run.system): outcome.mean_running
        for run, outcome in zip(runs, pool.outcomes(runs), strict=True)
    }
    names = tuple(SYSTEMS[system] for system in BATCHING)
    panels = tuple(
        Panel(
            f"{data}, {_load(rate)}",
            "",
            "sequences in a step",
            (Series("mean", names, tuple(mean[data, rate, system] for system in BATCHING)),),
            has_bars=True,
        )
        for data, rate in cells
    )
    paper = {("sharegpt", "orca-oracle"): 2.2, ("sharegpt", "orca-max"): 4.3}
    findings = [
        Finding(
            f"{data}, {_load(rate)}: sequences over {SYSTEMS[system]}",
            mean[data, rate, "quire"] / mean[data, rate, system],
            paper.get((data, system)),
            paper.get((data, system)),
            "×",
            WHY_BATCHES,
        )
        for (data, rate), system in product(cells, ("orca-oracle", "orca-max"))
    ]
    return Figure("13", "Figure 13: batched requests", panels, tuple(findings))


def _load(rate: float) -> str:
    return "all waiting" if rate == inf else f"{rate:g} requests/s"


def figure_15(pool: RunPool) -> Figure:
    """Blocks that sharing saves: OPT-13B. Preempted groups are swapped, to a host that has as many
    blocks as the device (the paper's section 4.5): computed again, each sample has a prompt of its
    own."""
    sizes = (2, 4, 6)
    swap = (("preemption_mode", "swap"), ("num_host_blocks", SETUPS["opt-13b"].slots // 16))
    paper = {
        ("alpaca", False): (6.1, 9.8),
        ("alpaca", True): (37.6, 55.2),
        ("sharegpt", False): (16.2, 30.5),
        ("sharegpt", True): (44.3, 66.3),
    }
    runs = [
        Run("opt-13b", "quire", data, rate=2.0, seconds=pool.seconds(120.0), n=n,
            is_search=is_search, changes=swap)
        for (data, is_search), n in product(paper, sizes)
    ]  # fmt: skip
    saved = {
        (run.workload, run.is_search, run.n): 100 * outcome.saved
        for run, outcome in zip(runs, pool.outcomes(runs), strict=True)
    }
    names = tuple(str(n) for n in sizes)
    panels = tuple(
        Panel(
            f"{data}: {'beams' if is_search else 'samples'}",
            "sequences",
            "% of blocks saved",
            (Series("quire", names, tuple(saved[data, is_search, n] for n in sizes)),),
            has_bars=True,
        )
        for data, is_search in paper
    )
    why = "depends on the spread of lengths, and for beams on where they branch, which are ours"
    findings = [
        Finding(
            f"{data}, {n} {'beams' if is_search else 'samples'}: blocks saved",
            saved[data, is_search, n],
            bounds[place],
            bounds[place],
            " %",
            why,
        )
        for (data, is_search), bounds in paper.items()
        for place, n in ((0, 2), (1, 6))
    ]
    return Figure("15", "Figure 15: memory saved by sharing", panels, tuple(findings))

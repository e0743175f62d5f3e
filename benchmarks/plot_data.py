"""Data of the plots of the documentation, read from the committed results and from nothing else.

A plot is panels side by side, a panel is series over common axes; `plots.py` draws them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PLOTS", "RESULTS", "Panel", "Plot", "Series", "shown"]

RESULTS = Path(__file__).parent / "results"
POLICIES = {
    "fcfs": "fcfs",
    "fcfs_threshold_128": "fcfs,\nthreshold 128",
    "priority": "priority",
    "fair": "fair",
    "two_level": "two_level",
    "srtf": "srtf",
}


@dataclass(frozen=True, slots=True)
class Series:
    """y over x: numbers of a line, or the names of groups of bars."""

    label: str
    x: tuple[float, ...] | tuple[str, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars if x are names, else lines. y_limit: cut of the axis, None at the largest value. log_x:
    whether x is logarithmic to the base of 2, with ticks at the values. log_y: whether y is, to the
    base of 10."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    y_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """source: the file in results/ that all numbers come from."""

    source: str
    panels: tuple[Panel, ...]


Figures = Mapping[str, float]


def shown(value: float) -> str:
    """Return the text of a bar's value."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def read_figures(source: str) -> Figures:
    """Medians, by name."""
    record = json.loads((RESULTS / source).read_text(encoding="utf-8"))
    return {name: spread["median"] for name, spread in record["figures"].items()}


def block_sharing() -> Plot:
    figures = read_figures("block_sharing.json")
    sizes = (2, 4, 6)

    def series(dataset: str, kind: str, label: str) -> Series:
        values = [figures[f"{dataset}_{size}_{kind}_saved_percent"] for size in sizes]
        return Series(label, tuple(map(str, sizes)), tuple(values))

    kinds = {"samples": ("samples", "parallel samples"), "beams": ("beams", "beam search")}
    panels = [
        Panel(
            title,
            x_label,
            "KV blocks saved, %",
            (
                series("sharegpt", kind, "ShareGPT-like"),
                series("alpaca", kind, "Alpaca-like"),
            ),
        )
        for kind, (x_label, title) in kinds.items()
    ]
    return Plot("block_sharing.json", tuple(panels))


def recovery() -> Plot:
    figures = read_figures("recovery.json")
    sizes = sorted({int(name.split(":")[0].removeprefix("block ")) for name in figures})

    def series(suffix: str, label: str) -> Series:
        values = [figures[f"block {size}: {suffix}"] for size in sizes]
        return Series(label, tuple(map(float, sizes)), tuple(values))

    cost = Panel(
        "cost of a preempted token, Qwen3-0.6B shape",
        "block size",
        "µs per token",
        (series("recompute, us/token", "recompute"), series("swap, us/token", "swap out and in")),
        log_x=True,
        log_y=True,
    )
    throughput = Panel(
        "cache for 8 of 24 requests, 12.6 M Llama",
        "block size",
        "output tokens/s",
        (
            series("recompute, output tokens/s", "recompute"),
            series("swap, output tokens/s", "swap"),
        ),
        log_x=True,
    )
    return Plot("recovery.json", (cost, throughput))


def shared_prefix() -> Plot:
    figures = read_figures("shared_prefix_simulated.json")
    systems = {
        "pinned": "pinned",
        "cached": "automatic reuse",
        "off": "no reuse",
        "orca": "Orca (Oracle)",
    }

    def series(prefix: int, system: str) -> Series:
        start = f"{prefix}.{system}."
        capacity = figures[start + "requests_per_s"]
        marker = start + "s_per_token_at_"
        loads = sorted(
            float(name.removeprefix(marker)) for name in figures if name.startswith(marker)
        )
        rates = tuple(load * capacity for load in loads)
        return Series(systems[system], rates, tuple(figures[f"{marker}{load}"] for load in loads))

    panels = [
        Panel(
            f"prefix of {prefix} tokens",
            "requests/s that arrive",
            "s per output token, arrival to end",
            tuple(series(prefix, system) for system in systems),
            y_limit=0.3,
        )
        for prefix in (80, 341)
    ]
    return Plot("shared_prefix_simulated.json", tuple(panels))


def policies() -> Plot:
    figures = read_figures("policies.json")

    def series(figure: str, label: str) -> Series:
        values = [figures[f"{policy}.{figure}"] for policy in POLICIES]
        return Series(label, tuple(POLICIES.values()), tuple(values))

    waits = Panel(
        "time to the first token, heavy-tailed trace",
        "",
        "s",
        (
            series("ttft_mean_s", "mean"),
            series("ttft_p99_s", "p99"),
            series("ttft_max_s", "longest"),
        ),
        log_y=True,
    )
    blocking = Panel(
        "head-of-line blocking: 32 tokens behind 12,000",
        "",
        "time to the first token, s",
        (series("ttft_blocked_s", "short prompt"),),
    )
    return Plot("policies.json", (waits, blocking))


def kv_waste() -> Plot:
    source = "kv_waste.json"
    traffic: dict[str, list[dict[str, Any]]] = json.loads((RESULTS / source).read_text())["traffic"]
    labels = {"sharegpt_like": "ShareGPT-like", "mixed": "mixed", "alpaca_like": "Alpaca-like"}
    series = [
        Series(
            label,
            tuple(float(run["block_size"]) for run in traffic[name]),
            tuple(run["waste_percent"] for run in traffic[name]),
        )
        for name, label in labels.items()
    ]
    panel = Panel(
        "KV slots that hold no token", "block size", "% of allocated slots", tuple(series), True
    )
    return Plot(source, (panel,))


def peers() -> Plot:
    """quire beside OpenVINO GenAI and llama.cpp, measured by turns, and beside vLLM's server. Bars
    of weights below 16 bits say their quality, that of a cache in 8 bits left out."""
    return Plot("cpu_turns_zen4/quire_int8_kv8.json", (*_openvino(), _llama_cpp(), _vllm_server()))


def with_quality(engine: str, reading: str) -> str:
    """Return the label of an engine, with the loss of quality of one reading of peer_quality.py."""
    divergence = read_figures("peer_quality.json")[f"{reading}: KL"]
    return f"{engine} (KL {divergence:.4f})"


def _openvino() -> list[Panel]:
    """Prefill and decode apart, on two machines."""
    readings = {"quire": "quire, int8", "OpenVINO GenAI": "OpenVINO GenAI, INT8"}
    folders = {"Zen 4": "cpu_turns_zen4", "Xeon with AMX": "cpu_turns_amx"}
    engines = {"quire": "quire_int8_kv8.json", "OpenVINO GenAI": "openvino_INT8.json"}
    decodes = {"1": "decode_1_tokens_per_s", "32": "decode_32_tokens_per_s"}
    return [
        Panel(
            f"{machine}, 8-bit weights and cache",
            "prompt tokens (prefill), output tokens (streams)",
            "tokens/s",
            tuple(
                Series(
                    with_quality(label, readings[label]),
                    ("prefill", *(f"{number} streams" for number in decodes)),
                    tuple(
                        read_figures(f"{folder}/{file}")[name]
                        for name in ("prefill_tokens_per_s", *decodes.values())
                    ),
                )
                for label, file in engines.items()
            ),
        )
        for machine, folder in folders.items()
    ]


def _llama_cpp() -> Panel:
    """The same GGUF file in both engines."""
    figures = read_figures("gguf_cpu.json")
    start = "SmolLM2-135M-Instruct.Q4_1.gguf, {}: "
    names = {
        "prefill": "prefill",
        "1 streams": "decode, 1 streams",
        "16 streams": "decode, 16 streams",
    }

    def series(engine: str) -> Series:
        values = [figures[f"{start.format(engine)}{name}, tokens/s"] for name in names.values()]
        return Series(with_quality(engine, f"{engine}, Q4_1"), tuple(names), tuple(values))

    return Panel(
        "Xeon with AMX, SmolLM2 135M in GGUF Q4_1",
        "prompt tokens (prefill), output tokens (streams)",
        "tokens/s",
        (series("quire"), series("llama.cpp")),
    )


def _vllm_server() -> Panel:
    """Servers over HTTP, with a model so small that the engine's own work shows."""
    sources = {"quire": "serving.json", "vLLM": "serving_vllm.json"}
    streams = ("1", "16", "64")

    def series(engine: str) -> Series:
        figures = read_figures(sources[engine])
        values = [figures[f"{number} streams, output_tokens_per_s"] for number in streams]
        return Series(engine, tuple(f"{number} streams" for number in streams), tuple(values))

    return Panel(
        "servers on an AMD EPYC, Llama of 12.6 M in 16 bits",
        "streams at once",
        "output tokens/s",
        (series("quire"), series("vLLM")),
    )


def grpo() -> Plot:
    source, size = "grpo.json", 10
    figures = json.loads((RESULTS / source).read_text(encoding="utf-8"))["figures"]
    rewards: list[float] = figures["reward"]["values"]
    places = range(0, len(rewards) - size + 1, size)
    means = Series(
        "reward",
        tuple(float(place + size) for place in places),
        tuple(sum(rewards[place : place + size]) / size for place in places),
    )
    panel = Panel("GRPO on the bundled model", "step", f"reward, mean of {size} steps", (means,))
    return Plot(source, (panel,))


PLOTS: Mapping[str, Callable[[], Plot]] = {
    "peers": peers,
    "block_sharing": block_sharing,
    "recovery": recovery,
    "shared_prefix": shared_prefix,
    "policies": policies,
    "kv_waste": kv_waste,
    "grpo": grpo,
}
"""Plots by the name of their file in docs/plots."""

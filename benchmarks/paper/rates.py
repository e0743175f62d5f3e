"""Figures of request rates: 12, 14, 16 and 17."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from benchmarks.paper.figure import Figure, Finding, Panel, Series
from benchmarks.paper.pool import RunPool
from benchmarks.paper.runs import LATENCY_LIMIT_S, SYSTEMS, Curve, Run

__all__ = ["figure_12", "figure_14", "figure_16", "figure_17"]

ORCAS = ("orca-oracle", "orca-pow2", "orca-max")
MODELS = ("opt-13b", "opt-66b", "opt-175b")
SECONDS, SECONDS_OF_SHORT = 300.0, 100.0
"""Length of a trace, and of one whose requests take a few seconds each; the paper has 15 minutes
for OPT-175B and an hour for the others."""

LONG_WORKLOADS = ("sharegpt", "paper-chat")

WHY_RATES = (
    "no rate above that at which all wait counts here, and the lengths have the paper's means, not "
    "its histograms"
)
WHY_CHAT = "how long the histories are is ours: more of the paper's may be cut to 1,024 tokens"


def figure_12(pool: RunPool) -> Figure:
    """Normalized latency against request rate, three models by two data sets."""
    cells = list(product(("sharegpt", "alpaca"), MODELS))
    curves = _curves(pool, cells, tuple(SYSTEMS))
    panels = [
        _rate_panel(f"{model}, {data}", {name: curves[data, model, name] for name in SYSTEMS})
        for data, model in cells
    ]
    findings: list[Finding] = []
    for data, model in cells:
        for name, (low, high) in {
            "orca-oracle": (1.7, 2.7),
            "orca-max": (2.7, 8.0),
            "faster-transformer": (None, 22.0),
        }.items():
            is_given = data == "sharegpt"
            ratio = curves[data, model, "quire"].sustained / curves[data, model, name].sustained
            findings.append(
                Finding(
                    f"{data}, {model}: rate over {SYSTEMS[name]}",
                    ratio,
                    low if is_given else None,
                    high if is_given else None,
                    "×",
                    WHY_RATES,
                )
            )
    return Figure(
        "12", "Figure 12: normalized latency by request rate", tuple(panels), tuple(findings)
    )


def figure_14(pool: RunPool) -> Figure:
    """Parallel samples and beams: OPT-13B, Alpaca; requests per second while all wait."""
    kinds = [(1, False), *product((2, 4, 6), (False,)), *product((2, 4, 6), (True,))]
    systems = ("quire", *ORCAS)
    runs = [
        Run("opt-13b", system, "alpaca", n=n, is_search=is_search)
        for (n, is_search), system in product(kinds, systems)
    ]
    found = pool.outcomes(runs)
    rates = {
        (run.n, run.is_search, run.system): each.requests_per_s
        for run, each in zip(runs, found, strict=True)
    }
    panels = [
        Panel(
            title,
            "sequences",
            "requests/s while all wait",
            tuple(
                Series(
                    SYSTEMS[system],
                    tuple(str(n) for n in (1, 2, 4, 6)),
                    tuple(rates[n, is_search and n > 1, system] for n in (1, 2, 4, 6)),
                )
                for system in systems
            ),
            has_bars=True,
        )
        for title, is_search in (("parallel samples", False), ("beams", True))
    ]

    def over_oracle(n: int, *, is_search: bool) -> float:
        return rates[n, is_search, "quire"] / rates[n, is_search, "orca-oracle"]

    why = (
        "rates while all wait, not at equal latency; and to Orca's favour its sequences compute "
        "their prompt once, and its beams copy no K/V"
    )
    findings = [
        Finding(
            "rate over Orca (Oracle), one sample",
            over_oracle(1, is_search=False),
            1.3,
            1.3,
            "×",
            why,
        ),
        Finding(
            "rate over Orca (Oracle), six samples", over_oracle(6, is_search=False), None, None, "×"
        ),
        Finding(
            "rate over Orca (Oracle), six beams", over_oracle(6, is_search=True), 2.3, 2.3, "×", why
        ),
    ]
    return Figure("14", "Figure 14: samples and beams", tuple(panels), tuple(findings))


def figure_16(pool: RunPool) -> Figure:
    """Translation with a shared prefix: LLaMA-13B."""
    names = {"quire": "quire", "orca-oracle": "Orca (Oracle)"}
    cells = [(f"translation-{prefix}", "llama-13b") for prefix in (80, 341)]
    curves = _curves(pool, cells, tuple(names), (("enable_prefix_caching", True),))
    panels = [
        _rate_panel(f"prefix of {data.removeprefix('translation-')} tokens",
                    {name: curves[data, model, name] for name in names})
        for data, model in cells
    ]  # fmt: skip
    why = "the paper does not give the lengths of its sentences; ours are stated in the workload"
    findings = [
        Finding(
            f"{data.removeprefix('translation-')} tokens of prefix: rate over Orca (Oracle)",
            curves[data, model, "quire"].sustained / curves[data, model, "orca-oracle"].sustained,
            paper,
            paper,
            "×",
            why,
        )
        for (data, model), paper in zip(cells, (1.67, 3.58), strict=True)
    ]
    return Figure("16", "Figure 16: a shared prefix", tuple(panels), tuple(findings))


def figure_17(pool: RunPool) -> Figure:
    """Chat with histories cut to 1,024 tokens: OPT-13B."""
    systems = ("quire", *ORCAS)
    curves = _curves(pool, [("paper-chat", "opt-13b")], systems)
    of = {name: curves["paper-chat", "opt-13b", name] for name in systems}
    findings = [
        Finding(
            f"chat: rate over {SYSTEMS[name]}",
            of["quire"].sustained / of[name].sustained,
            2.0,
            2.0,
            "×",
            WHY_CHAT,
        )
        for name in ORCAS
    ]
    panel = _rate_panel("OPT-13B, histories of ShareGPT", of)
    return Figure("17", "Figure 17: chat", (panel,), tuple(findings))


def _curves(
    pool: RunPool,
    cells: Sequence[tuple[str, str]],
    systems: Sequence[str],
    changes: tuple[tuple[str, bool], ...] = (),
) -> dict[tuple[str, str, str], Curve]:
    """Return curves by workload, setup and system. changes: changed settings of quire."""
    runs = [
        Run(model, system, data,
            seconds=pool.seconds(SECONDS if data in LONG_WORKLOADS else SECONDS_OF_SHORT),
            changes=changes if system == "quire" else ())
        for (data, model), system in product(cells, systems)
    ]  # fmt: skip
    return {
        (run.workload, run.setup, run.system): curve
        for run, curve in zip(runs, pool.curves(runs), strict=True)
    }


def _rate_panel(title: str, curves: Mapping[str, Curve]) -> Panel:
    return Panel(
        title,
        "requests/s",
        "normalized latency, s/token",
        tuple(
            Series(SYSTEMS[name], *(tuple(v) for v in zip(*curve.points, strict=True)))
            for name, curve in curves.items()
        ),
        y_limit=2 * LATENCY_LIMIT_S,
    )

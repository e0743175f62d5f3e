"""Headlines with each constant of the device 20 % down and up, while all requests wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.paper.ablations import worst_recovery
from benchmarks.paper.figure import Figure, Finding, Panel, Series
from benchmarks.paper.pool import RunPool
from benchmarks.paper.runs import SETUPS, SYSTEMS, Outcome, Run, Scale

from quire.entrypoints.simulator.devices import CONSTANTS, device_named

__all__ = ["figure_constants"]

CHANGE = 0.2
AS_STATED = ("", 1.0)

PRODUCTS = {"read_share": "bytes_per_s", "arithmetic_share": "flop_per_s"}
"""Constants that only count times another: 20 % of one is 20 % of the other."""

OF_SEVERAL_DEVICES = ("link_bytes_per_s", "all_reduce_s")
OF_COPIES = ("host_bytes_per_s", "copy_call_s")
"""These count where K/V are copied to the host, which no simulated run here does."""


@dataclass(frozen=True, slots=True)
class _Headline:
    """A figure of quire's run, over that of another system."""

    name: str
    run: Run
    over: str
    value: Callable[[Outcome], float]

    @property
    def runs(self) -> list[Run]:
        """Quire's, and that of the other system."""
        return [self.run, replace(self.run, system=self.over, changes=())]


def _rate(outcome: Outcome) -> float:
    return outcome.requests_per_s


def _sequences(outcome: Outcome) -> float:
    return outcome.mean_running


def _headlines() -> list[_Headline]:
    small = Run("opt-13b", "quire", "sharegpt")
    beams = Run("opt-13b", "quire", "alpaca", n=6, is_search=True)
    reuse = (("enable_prefix_caching", True),)
    return [
        *(
            _Headline(f"12: {setup}, rate over {SYSTEMS[over]}", replace(small, setup=setup), over,
                      _rate)
            for setup, over in product(
                ("opt-13b", "opt-66b", "opt-175b"),
                ("orca-oracle", "orca-max", "faster-transformer"),
            )
        ),
        *(
            _Headline(f"13: sequences over {SYSTEMS[over]}", small, over, _sequences)
            for over in ("orca-oracle", "orca-max")
        ),
        _Headline("14: one sample, rate over Orca (Oracle)",
                  replace(small, workload="alpaca"), "orca-oracle", _rate),
        _Headline("14: six beams, rate over Orca (Oracle)", beams, "orca-oracle", _rate),
        *(
            _Headline(
                f"16: prefix of {prefix}, rate over Orca (Oracle)",
                Run("llama-13b", "quire", f"translation-{prefix}", changes=reuse),
                "orca-oracle",
                _rate,
            )
            for prefix in (80, 341)
        ),
        _Headline("17: chat, rate over Orca (Oracle)",
                  replace(small, workload="paper-chat"), "orca-oracle", _rate),
    ]  # fmt: skip


def figure_constants(pool: RunPool) -> Figure:
    """All headlines by changed constant."""
    headlines = _headlines()
    scales = [AS_STATED, *product(CONSTANTS, (1 - CHANGE, 1 + CHANGE))]
    runs = [run for each in headlines for run in each.runs]
    asked = [(run, tuple(dict.fromkeys(_as_counts(run, s) for s in scales))) for run in runs]
    found = {
        run: dict(zip(changes, outcomes, strict=True))
        for (run, changes), outcomes in zip(asked, pool.scaled(asked), strict=True)
    }
    values: dict[str, list[float]] = {}
    for each in headlines:
        ours, theirs = [
            [each.value(found[run][_as_counts(run, scale)]) for scale in scales]
            for run in each.runs
        ]
        values[each.name] = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    device = device_named(SETUPS["opt-13b"].device)
    changed = [device.scaled(*scale) if scale[0] else device for scale in scales]
    values["19: recompute over swap, the worst block size"] = list(map(worst_recovery, changed))
    return _figure(values, [f"{name} × {factor:g}" if name else "as stated"
                            for name, factor in scales])  # fmt: skip


def _figure(values: Mapping[str, Sequence[float]], labels: Sequence[str]) -> Figure:
    """values: values of each headline, as stated and by change."""
    panels = [
        Panel(name, "", "", (Series("quire", tuple(labels), tuple(row)),), has_bars=True)
        for name, row in values.items()
    ]
    findings = [
        Finding(
            f"{name}: most by one constant",
            100 * max(abs(value / row[0] - 1) for value in row),
            unit=" %",
        )
        for name, row in values.items()
    ]
    return Figure("constants", "Each constant 20 % down and up", tuple(panels), tuple(findings))


def _as_counts(run: Run, scale: Scale) -> Scale:
    """Return what a change does to a run: it stays as it is if it does not depend on a constant."""
    name, factor = scale
    is_idle = name in OF_COPIES or (
        name in OF_SEVERAL_DEVICES and SETUPS[run.setup].num_devices == 1
    )
    return AS_STATED if is_idle else (PRODUCTS.get(name, name), factor)

"""A capacity plan as text and as a plot."""

from __future__ import annotations

from quire.entrypoints.simulator.figure import Figure, Panel, Series
from quire.entrypoints.simulator.planner.capacity import Capacity

__all__ = ["capacity_figure", "render_capacity"]


def render_capacity(plan: Capacity) -> str:
    """At most a screen of text: options, load, and what breaks."""
    settings = ", ".join(f"{name}={value}" for name, value in plan.settings.items())
    lines = [
        f"workload    {plan.requests:,} requests, {plan.rate:.2f} per second",
        f"limits      {plan.slo.describe()}",
        f"settings    {settings}",
        "",
        "devices  kind        share a model  servers  KV blocks of each  within limits",
    ]
    lines += [
        f"{each.num_devices:>7}  {each.device:<10}  {each.degree:>13}  {each.replicas:>7}  "
        f"{each.num_kv_blocks:>17,}  {100 * each.kept:>11.1f} %"
        for each in plan.options
    ]
    lines += [f"      –  {label}: {why}" for label, why in plan.unfit.items()]
    lines += ["", "requests/s  within limits  goodput/s   (first line of the table)"]
    lines += [
        f"{load.rate:>10.2f}  {100 * load.kept:>11.1f} %  {load.goodput:>9.2f}"
        for load in plan.loads
    ]
    return "\n".join([*lines, "", f"when the traffic doubles, first breaks {plan.breaks}"])


def capacity_figure(plan: Capacity) -> Figure:
    """Goodput by rate, for `quire.entrypoints.simulator.svg.draw_figure`."""
    rates = tuple(load.rate for load in plan.loads)
    best = plan.options[0]
    panel = Panel(
        f"{best.num_devices} x {best.device}",
        "requests/s",
        "requests/s within limits",
        (
            Series("goodput", rates, tuple(load.goodput for load in plan.loads)),
            Series("all", rates, rates),
        ),
    )
    return Figure("goodput", "Goodput by request rate", (panel,))

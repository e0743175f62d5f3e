"""Figures of choices within one system: 18b, 19, policies, step budgets."""

from __future__ import annotations

from itertools import product

from benchmarks.paper.figure import Figure, Finding, Panel, Series
from benchmarks.paper.pool import RunPool
from benchmarks.paper.runs import SETUPS, Run

from quire.config.settings import SCHEDULING_POLICIES
from quire.entrypoints.simulator.devices import Device, device_named
from quire.entrypoints.simulator.models import model_spec
from quire.entrypoints.simulator.step_cost import StepCost

__all__ = ["figure_18b", "figure_19", "figure_budgets", "figure_policies", "worst_recovery"]

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = 300.0
LOAD = 0.95
"""Request rate of the ablations over that at which all wait, with blocks of 16: the paper does not
say its own, and below it memory is no limit."""

WHY_BLOCKS = (
    "the paper does not say its rates: near the limit of the memory a block that is not full "
    "costs more latency than at lower rates, where only the kernel's loads differ"
)

RECOVERED_TOKENS = 256
BUDGETS = (256, 512, 1024, 2048, 4096)


def figure_18b(pool: RunPool) -> Figure:
    """Normalized latency by block size: OPT-13B."""
    rates = _rates(pool, ("sharegpt", "alpaca"))
    runs = [
        Run(
            "opt-13b",
            "quire",
            data,
            rate=rate,
            seconds=pool.seconds(SECONDS),
            changes=(("block_size", size),),
        )
        for (data, rate), size in product(rates.items(), BLOCK_SIZES)
    ]
    latency = {
        (run.workload, run.changes[0][1]): outcome.normalized_latency_s
        for run, outcome in zip(runs, pool.outcomes(runs), strict=True)
    }
    panels = tuple(
        Panel(
            f"{data}, {rate:.1f} requests/s",
            "block size",
            "normalized latency, s/token",
            (
                Series(
                    "quire",
                    tuple(map(float, BLOCK_SIZES)),
                    tuple(latency[data, size] for size in BLOCK_SIZES),
                ),
            ),
            log_x=True,
        )
        for data, rate in rates.items()
    )

    def over_best(data: str, size: int) -> float:
        return latency[data, size] / min(latency[data, other] for other in BLOCK_SIZES)

    findings = [
        Finding("alpaca: latency at 16 over the best", over_best("alpaca", 16), None, 1.0, "×",
                WHY_BLOCKS),
        Finding("alpaca: latency at 256 over the best", over_best("alpaca", 256), 1.2, None, "×",
                WHY_BLOCKS),
        *(
            Finding(f"sharegpt: latency at {size} over the best", over_best("sharegpt", size),
                    None, 1.0, "×", WHY_BLOCKS)
            for size in (16, 32, 64, 128)
        ),
    ]  # fmt: skip
    return Figure("18b", "Figure 18b: block size", panels, tuple(findings))


def figure_19(pool: RunPool) -> Figure:
    """Recomputation and swapping by block size: OPT-13B, ShareGPT."""
    setup = SETUPS["opt-13b"]
    device = device_named(setup.device)
    again, copies = _overheads(device)
    rate = _rates(pool, ("sharegpt",))["sharegpt"]
    cells = list(product(("recompute", "swap"), BLOCK_SIZES))
    runs = [
        Run(
            "opt-13b",
            "quire",
            "sharegpt",
            rate=rate,
            seconds=pool.seconds(SECONDS),
            changes=(("block_size", size), *_recovery(mode, setup.slots // size)),
        )
        for mode, size in cells
    ]
    latency = {
        cell: outcome.normalized_latency_s
        for cell, outcome in zip(cells, pool.outcomes(runs), strict=True)
    }
    sizes = tuple(map(float, BLOCK_SIZES))
    overhead = Panel(
        f"overhead of {RECOVERED_TOKENS} tokens",
        "block size",
        "ms",
        (
            Series("recompute", sizes, tuple(1e3 * again for _ in BLOCK_SIZES)),
            Series("swap in", sizes, tuple(1e3 * copies[size] for size in BLOCK_SIZES)),
            Series("swap in and out", sizes, tuple(2e3 * copies[size] for size in BLOCK_SIZES)),
        ),
        log_x=True,
    )
    served = Panel(
        f"ShareGPT at {rate:.1f} requests/s",
        "block size",
        "normalized latency, s/token",
        tuple(
            Series(mode, sizes, tuple(latency[mode, size] for size in BLOCK_SIZES))
            for mode in ("recompute", "swap")
        ),
        log_x=True,
    )
    why = (
        "copies of large blocks reach the peak of the link here; the paper does not say what its "
        "own reached"
    )
    findings = [
        Finding(
            "recompute over swap, the worst block size",
            worst_recovery(device),
            None,
            1.2,
            "×",
            why,
        ),
        *(
            Finding(
                f"latency of recompute over swap, blocks of {size}",
                latency["recompute", size] / latency["swap", size],
                1.0,
                1.0,
                "×",
                "the paper says that they are comparable",
            )
            for size in (16, 64)
        ),
    ]
    return Figure("19", "Figure 19: recompute or swap", (overhead, served), tuple(findings))


def worst_recovery(device: Device) -> float:
    """Return the seconds to compute tokens of OPT-13B again over those to swap them out and in,
    with the block size that makes most of it."""
    again, copies = _overheads(device)
    return max(again / (2 * seconds) for seconds in copies.values())


def _overheads(device: Device) -> tuple[float, dict[int, float]]:
    """Return the seconds to compute `RECOVERED_TOKENS` again, and to copy them one way, by block
    size."""
    spec = model_spec(SETUPS["opt-13b"].model)
    costs = {size: StepCost(device, spec, block_size=size) for size in BLOCK_SIZES}
    copies = {size: cost.copy_s(-(-RECOVERED_TOKENS // size)) for size, cost in costs.items()}
    cost = costs[16]
    return max(RECOVERED_TOKENS * cost.token_s, cost.weights_s) + cost.launch_s, copies


def _recovery(mode: str, num_blocks: int) -> tuple[tuple[str, str | int], ...]:
    """Return settings of a mode. Those of recomputation are the default, as in figure 18b."""
    swap = (("preemption_mode", "swap"), ("num_host_blocks", num_blocks))
    return swap if mode == "swap" else ()


def _rates(pool: RunPool, workloads: tuple[str, ...]) -> dict[str, float]:
    """Return request rates that nearly fill OPT-13B's device, by workload."""
    full = pool.outcomes([Run("opt-13b", "quire", data) for data in workloads])
    return {
        data: LOAD * outcome.requests_per_s for data, outcome in zip(workloads, full, strict=True)
    }


def figure_policies(pool: RunPool) -> Figure:
    """Order of service on heavy-tailed prompts: Llama-3.1-8B (the thesis, section 4.5)."""
    runs = [
        Run("llama-3.1-8b", "quire", "heavy-tailed", rate=11.0, seconds=pool.seconds(SECONDS),
            changes=(("scheduling_policy", policy), ("max_num_seqs", 64),
                     ("max_num_batched_tokens", 512), ("enable_prefix_caching", True)))
        for policy in SCHEDULING_POLICIES
    ]  # fmt: skip
    found = dict(zip(SCHEDULING_POLICIES, pool.outcomes(runs), strict=True))
    parts = (
        ("mean", "ttft_mean_s"),
        ("short half", "ttft_short_s"),
        ("p99", "ttft_p99_s"),
        ("longest", "ttft_max_s"),
    )
    panels = tuple(
        Panel(
            f"time to the first token, {label}",
            "",
            "s",
            (
                Series(
                    "quire",
                    SCHEDULING_POLICIES,
                    tuple(getattr(found[policy], name) for policy in SCHEDULING_POLICIES),
                ),
            ),
            has_bars=True,
        )
        for label, name in parts
    )
    first, *others = SCHEDULING_POLICIES
    findings = [
        Finding(
            f"mean TTFT of {policy} over {first}",
            found[policy].ttft_mean_s / found[first].ttft_mean_s,
            unit="×",
        )
        for policy in others
    ]
    worst = max(outcome.ttft_max_s for outcome in found.values())
    findings.append(
        Finding(
            "longest TTFT of two_level over that of all policies",
            found["two_level"].ttft_max_s / worst,
            unit="×",
        )
    )
    return Figure("policies", "The thesis: order of service", panels, tuple(findings))


def figure_budgets(pool: RunPool) -> Figure:
    """Tokens of a step (chunked prefill): Llama-3.1-8B on heavy-tailed prompts."""
    runs = [
        Run("llama-3.1-8b", "quire", "heavy-tailed", rate=8.0, seconds=pool.seconds(SECONDS),
            changes=(("max_num_batched_tokens", budget), ("max_num_seqs", 64)))
        for budget in BUDGETS
    ]  # fmt: skip
    found = pool.outcomes(runs)
    panels = tuple(
        Panel(
            title,
            "tokens in a step",
            "s",
            (Series("quire", tuple(map(float, BUDGETS)), tuple(getattr(o, name) for o in found)),),
            log_x=True,
        )
        for title, name in (
            ("time to the first token, mean", "ttft_mean_s"),
            ("time per token after it, p99", "tpot_p99_s"),
        )
    )
    return Figure("budgets", "Tokens of a step", panels)

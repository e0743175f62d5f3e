"""Drawing tokens on the CPU: every kernel, and the way without kernels, by turns, beside the
machine's limits.

    python -m benchmarks.kernels.draw_cpu [--quick] [--threads N] [--repeats N] [--output FILE]

Random logits, so flat that filters leave many candidates (scale 1) or as sharp as those of a
language model (scale 5), in vocabularies from the bundled model's to Qwen3's. A figure is in
millions of logits per second, which all vocabularies have in common: a draw reads all of its row.
Medians over the repeats, with the lowest and highest. Every provider is compared with the reference
before it is timed. Instruction sets that only widen other kernels are left out.
"""

# ruff: isort: skip_file
# kernel_figures settles how threads wait before torch is imported
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

from benchmarks.kernels.kernel_figures import SEED, Call, Figure, figures_by_turns, run
import torch

from quire.ops import ALL_OPS, Team, check_provider
from quire.ops.compile import ISAS
from quire.base.platform import detect_platform

DRAW = ALL_OPS["draw"]
VOCABULARIES = (4096, 32_768, 151_936)
ROWS = (1, 8, 64)
SCALES = (1.0, 5.0)
SETTINGS = {
    "no filter": (1.0, 0, 1.0, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50, top-p 0.95, min-p 0.05": (0.7, 50, 0.95, 0.05),
}
"""Name to temperature, top_k, top_p and min_p."""

Draw = Callable[..., torch.Tensor]


def draw_arguments(
    vocab_size: int, rows: int, scale: float, setting: tuple[float, int, float, float]
) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `draw`: one draw from each row, all with one setting."""
    generator = torch.Generator().manual_seed(SEED)
    temperature, top_k, top_p, min_p = setting
    index = torch.arange(rows)
    return (
        torch.randn(rows, vocab_size, generator=generator) * scale,
        index,
        torch.full((rows,), temperature, dtype=torch.float64),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), min_p, dtype=torch.float64),
        index + SEED,
        torch.zeros_like(index),
        index + 100,
    )


def contenders(team: Team) -> dict[str, Draw]:
    """Every provider of this machine with a kernel of its own, and the one without compiled
    kernels; all equal the reference."""
    platform = detect_platform()
    own = {f"cpu_{isa.name}" for isa in ISAS if isa.extends is None or "draw" in isa.units}
    own.add("numpy")
    found: dict[str, Draw] = {}
    for provider in DRAW.providers:
        if provider.name in own and provider.unavailable(platform) is None:
            report = check_provider(DRAW, provider)
            if not report.ok:
                raise SystemExit("\n".join(report.failures))
            found[provider.name] = provider.load(team)
    return found


def draw_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """All contenders over vocabularies, numbers of rows and settings."""
    calls = contenders(Team(torch.get_num_threads()))
    for vocab_size in VOCABULARIES[1:2] if options.quick else VOCABULARIES:
        for rows in ROWS[:2] if options.quick else ROWS:
            for scale in SCALES:
                for label, setting in SETTINGS.items():
                    arguments = draw_arguments(vocab_size, rows, scale, setting)
                    title = f"{rows} of {vocab_size}, scale {scale:g}, {label}"
                    # kernel_figures counts billions of what it is given.
                    amount = 1e3 * rows * vocab_size
                    turns: list[Call] = [
                        (f"{title}, {name}", "M/s", amount, lambda f=call, a=arguments: f(*a))
                        for name, call in calls.items()
                    ]
                    yield from figures_by_turns(turns, options.repeats)


if __name__ == "__main__":
    run("draw_cpu", __doc__, draw_figures)

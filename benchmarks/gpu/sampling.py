"""Drawing, edits of logits and log-probabilities at the vocabulary of Qwen3: time of a call, all in
one CUDA graph. Laws as sharp as those of a language model (standard deviation 5), and flat ones
(1), where a bucket of the filters has more tokens than are sorted at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.part import Part
from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, select

__all__ = ["run"]

ROWS = (1, 8, 64, 256)
# name: temperature, top_k, top_p, min_p
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "no filter": (1.0, 0, 1.0, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50, top-p 0.95, min-p 0.05": (0.7, 50, 0.95, 0.05),
}
HISTORY = 2048


def run(part: Part) -> None:
    """Time the operations of sampling by number of rows, dtype of the logits, and settings."""
    vocab_size = 1000 if part.is_dry else 151_936
    platform = detect_platform(part.device.type)
    ops = {
        name: select(ALL_OPS[name], platform)[1]
        for name in ("draw", "edit_logits", "token_logprobs")
    }
    for count in (1, 3) if part.is_dry else ROWS[::3] if part.quick else ROWS:
        for dtype in (torch.bfloat16, torch.float32):
            for scale in (5.0, 1.0):
                logits = (torch.randn(count, vocab_size, device=part.device) * scale).to(dtype)
                title = f"{count} rows, {dtype}, deviation {scale:g}"
                for label, setting in SETTINGS.items():
                    arguments = _draw_arguments(part, count, setting)
                    _measure(
                        part, f"draw {title}, {label}", partial(ops["draw"], logits, *arguments)
                    )
                if scale == 1.0:
                    continue
                rows = torch.arange(count, device=part.device)
                for k in (0, 20):
                    call = partial(ops["token_logprobs"], logits, rows, rows.int(), k)
                    _measure(part, f"token_logprobs {title}, {k} listed", call)
                edits = _edit_arguments(part, count, vocab_size)
                call = partial(ops["edit_logits"], logits, rows, rows, *edits)
                _measure(part, f"edit_logits {title}, penalties over {HISTORY} tokens", call)


def _measure(part: Part, name: str, call: Callable[[], object]) -> None:
    try:
        seconds = part.seconds_of(call, 30)
    except Exception as error:  # noqa: BLE001  a kernel that does not run; the next one may
        part.check(name, [f"{type(error).__name__}: {error}"])
        return
    part.figure(name, "us", [1e6 * each for each in seconds])


def _draw_arguments(
    part: Part, count: int, setting: tuple[float, int, float, float]
) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `draw` after the logits: all rows have one setting."""
    index = torch.arange(count, device=part.device)
    temperature, top_k, top_p, min_p = setting
    numbers = (torch.full_like(index, value, dtype=torch.float64) for value in (top_p, min_p))
    return (
        index,
        torch.full_like(index, temperature, dtype=torch.float64),
        torch.full_like(index, top_k),
        *numbers,
        index + part.seed,
        torch.zeros_like(index),
        index + HISTORY,
    )


def _edit_arguments(part: Part, count: int, vocab_size: int) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `edit_logits` after the slots: half of each history is output, a stop
    token is banned."""
    index = torch.arange(count, device=part.device)
    history = torch.randint(vocab_size, (count, HISTORY), device=part.device, dtype=torch.int32)
    starts = torch.arange(count + 1, device=part.device, dtype=torch.int32)
    none = torch.zeros_like(starts)
    empty = torch.zeros(0, device=part.device, dtype=torch.int32)
    bans = torch.tensor([[3, HISTORY, 0, -1]], device=part.device, dtype=torch.int32)
    penalties = torch.tensor([[1.1, 0.5, 0.2]], device=part.device, dtype=torch.float64)
    return (
        history,
        torch.full_like(index, HISTORY // 2),
        torch.full_like(index, HISTORY),
        penalties.repeat(count, 1),
        none,
        empty,
        empty.float(),
        none,
        empty,
        starts,
        bans.repeat(count, 1),
        empty,
    )

"""A rank of a model whose forward fails, between two exchanges, whenever it computes a fatal token.

Run in place of `quire.compute.executor.processes.rank_process`; with the argument "replays", all
replays fail there instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this file's folder

import torch  # noqa: E402

from quire.compute.executor.processes.rank_process import main as run_rank  # noqa: E402
from quire.compute.layers.linear import RowLinear  # noqa: E402
from quire.compute.models.llama import LlamaModel  # noqa: E402
from quire.ops.native.replay import ReplayList  # noqa: E402

FATAL = 77
"""A token id of prompts."""
COMMAND = (sys.executable, __file__)
REPLAYS_COMMAND = (*COMMAND, "replays")

_left: list[int] = []
"""Projections until the fault, in the forward that is under way."""


def fail_at_fatal_tokens() -> None:
    forward, call = LlamaModel.forward, RowLinear.__call__

    def failing_forward(
        self: LlamaModel, token_ids: torch.Tensor, positions: torch.Tensor, step: Any
    ) -> torch.Tensor:
        _left[:] = [2] if bool((token_ids == FATAL).any()) else []
        return forward(self, token_ids, positions, step)

    def failing_call(self: RowLinear, x: torch.Tensor) -> torch.Tensor:
        if _left:
            _left[0] -= 1
            if _left[0] == 0:
                raise RuntimeError("a fault of one rank")
        return call(self, x)

    LlamaModel.forward = failing_forward  # type: ignore[method-assign]
    RowLinear.__call__ = failing_call  # type: ignore[method-assign]


def fail_in_replays() -> None:
    run = ReplayList.run

    def failing_run(self: ReplayList, count: int | None = None) -> None:
        run(self, len(self) // 2 if count is None else count)
        raise RuntimeError("a fault of one rank")

    ReplayList.run = failing_run  # type: ignore[method-assign]


def main() -> int:
    if sys.argv[1:] == ["replays"]:
        fail_in_replays()
    else:
        fail_at_fatal_tokens()
    return run_rank()


if __name__ == "__main__":
    sys.exit(main())

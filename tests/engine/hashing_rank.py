"""A rank of a model that notes the bits of what it computes, so that ranks with other ones end.

Run in place of `quire.compute.executor.processes.rank_process`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this file's folder

import torch  # noqa: E402

from quire.compute.executor.processes.rank_process import main as run_rank  # noqa: E402
from quire.compute.layers.embedding import LMHead  # noqa: E402

COMMAND = (sys.executable, __file__)
NOTED: list[torch.Size] = []
"""Shapes of the logits that this process has noted."""

_call = LMHead.__call__


def call_and_note(self: LMHead, hidden: torch.Tensor) -> torch.Tensor:
    """`LMHead.__call__`, after which the rank has noted the logits, and the hidden states that they
    are of. Logits alone would say nothing: all ranks have the parts of all, whatever each part was
    computed from."""
    logits = _call(self, hidden)
    note = self._vocabulary._collectives.note
    note(hidden.contiguous().view(torch.uint8).numpy().tobytes())
    note(logits.numpy().tobytes())
    NOTED.append(logits.shape)
    return logits


def main() -> int:
    LMHead.__call__ = call_and_note  # type: ignore[method-assign]
    return run_rank()


if __name__ == "__main__":
    sys.exit(main())

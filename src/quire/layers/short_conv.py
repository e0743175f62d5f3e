"""Short convolution of LFM2 (arXiv:2511.23404): a recurrent layer whose state is a few tokens."""

from __future__ import annotations

import torch

from quire.attention import StepInputs
from quire.config.shard import Share
from quire.layers.weights import Cut, DenseWeights
from quire.ops import OpSet

__all__ = ["ShortConv"]


class ShortConv:
    """C · conv(B · v) over the channels of this rank, by row.

    state_bytes: bytes of one sequence's state, from byte `at` of its place on.
    """

    def __init__(
        self,
        ops: OpSet,
        channels: Share,
        taps: int,
        at: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
    ) -> None:
        self._short_conv = ops.short_conv
        self._weight = torch.empty((taps, channels.count), dtype=dtype, device=device)
        self._bias = None
        storage = {"weight": self._weight.t().unsqueeze(1)}
        if bias:
            self._bias = storage["bias"] = torch.empty(channels.count, dtype=dtype, device=device)
        cuts = {} if channels.is_whole else dict.fromkeys(storage, Cut(0, channels))
        self.weights = DenseWeights(storage, cuts=cuts)
        self.state_bytes = (taps - 1) * channels.count * dtype.itemsize
        self._at, self._dtype = at, dtype
        self._places, self._states = self._weight, self._weight  # of no step yet

    def __call__(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """x [T, 3 · E]: B, C and v of each token → [T, E]. Reads and writes the rows' states."""
        states = step.states
        assert states is not None, "the step of a model with recurrent states has them"
        if states.places is not self._places:  # a view costs as much as the operation
            own = states.places[:, self._at : self._at + self.state_bytes]
            self._places, self._states = states.places, own.view(self._dtype)
        return self._short_conv(
            x,
            self._weight,
            self._bias,
            self._states,
            states.read,
            states.write,
            states.slots,
            step.query_start_loc,
            states.num_computed,
        )

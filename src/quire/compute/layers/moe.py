"""Mixtures of experts: a router chooses a few of many feed-forward networks for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quire.base.errors import EngineError
from quire.compute.layers.adapter_contents import ExpertContent, LowRank, SlotContents
from quire.compute.layers.linear import Linear, MergedLinear
from quire.compute.layers.mlp import GatedMLP
from quire.compute.layers.weights import DenseWeights, LayerWeights, Placement
from quire.compute.quantization import MatrixFormats, StoredMatrix, WeightFormat
from quire.config.model_spec import MatrixShape, Routing
from quire.config.shard import Share
from quire.ops import OpSet, PackedMatrix
from quire.ops.distributed import Collectives
from quire.ops.moe.experts import ExpertLayers

__all__ = [
    "ExpertNumbers",
    "Experts",
    "ExpertsShape",
    "MixtureOfExperts",
    "Router",
    "SharedExpert",
    "ToldFormat",
]


class ExpertNumbers:
    """A number of each expert, float32 [E], which is added to its score where experts are chosen,
    or multiplies its weight."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.values = torch.empty(num_experts, dtype=torch.float32, device=device)
        self.weights = DenseWeights({"": self.values})


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Experts of all ranks together. size, inner: widths of x and of an expert."""

    num_experts: int
    size: int
    inner: int
    activation: str
    bias: bool


class Experts:
    """The networks of this rank's experts; x [T, H] → [T, H]. Experts of other ranks add zero.

    gate_up, down: layers by expert, the first with parts "gate" and "up"; None for experts of other
    ranks.
    """

    def __init__(
        self,
        ops: OpSet,
        own: range,
        shape: ExpertsShape,
        formats: MatrixFormats,
        placement: Placement,
    ) -> None:
        """own: this rank's experts among all."""
        self._make, self._dtype, self._own = ops.experts, placement.dtype, own
        self._matrices: dict[tuple[int, int], PackedMatrix] = {}
        self._layers: ExpertLayers | None = None
        parts = {part: Share.whole(shape.inner) for part in ("gate", "up")}
        outer = MatrixShape(2 * shape.inner, shape.size)
        down = MatrixShape(shape.size, shape.inner)
        self.gate_up: Mapping[int, MergedLinear | None] = {
            expert: None
            if expert not in own
            else MergedLinear(
                ToldFormat(formats.choose(outer), partial(self._take, (0, expert))),
                shape.size,
                parts,
                placement,
                bias=shape.bias,
                gate=shape.activation,
            )
            for expert in range(shape.num_experts)
        }
        self.down: Mapping[int, Linear | None] = {
            expert: None
            if expert not in own
            else Linear(
                ToldFormat(formats.choose(down), partial(self._take, (1, expert))),
                shape.inner,
                Share.whole(shape.size),
                placement,
                bias=shape.bias,
            )
            for expert in range(shape.num_experts)
        }

    @property
    def weights(self) -> Mapping[int, tuple[LayerWeights, LayerWeights]]:
        """Weights of gate and up, and of down, by this rank's experts."""
        found: dict[int, tuple[LayerWeights, LayerWeights]] = {}
        for expert in self._own:
            gate_up, down = self.gate_up[expert], self.down[expert]
            assert gate_up is not None and down is not None, "it is of this rank"
            found[expert] = gate_up.weights, down.weights
        return found

    def _take(self, place: tuple[int, int], matrix: PackedMatrix) -> None:
        """Take a layer that is loaded. The experts can compute once the last one is."""
        self._matrices[place] = matrix
        if len(self._matrices) == 2 * len(self._own):
            layers = ([self._matrices[kind, expert] for expert in self._own] for kind in (0, 1))
            self._layers = self._make(*layers, dtype=self._dtype, first=self._own.start)
            self._matrices.clear()

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        shared: torch.Tensor | None = None,
        shared_logits: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Compute as `quire.ops.moe.experts` defines. Raises EngineError before all are loaded."""
        if self._layers is None:
            raise EngineError("Experts were used before their weights were loaded; this is a bug.")
        return self._layers(
            x, ids, weights, shared=shared, shared_logits=shared_logits, out_dtype=out_dtype
        )


class ToldFormat:
    """A format that passes each matrix which `chosen` packs on to the layer that computes with
    it."""

    def __init__(self, weight_format: WeightFormat, take: Callable[[PackedMatrix], None]) -> None:
        self.chosen, self._take = weight_format, take

    @property
    def keeps_stored(self) -> bool:
        return self.chosen.keeps_stored

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        matrix = self.chosen.pack(weight, bias, gate=gate)
        self._take(matrix)
        return matrix

    def keep(
        self,
        parts: Sequence[StoredMatrix | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gate: str | None = None,
    ) -> PackedMatrix:
        matrix = self.chosen.keep(parts, bias, dtype, gate=gate)
        self._take(matrix)
        return matrix


class AdaptedExperts:
    """Recomputes, eagerly, the experts of rows whose adapter changes some of them."""

    def __init__(
        self, ops: OpSet, experts: Experts, contents: SlotContents[ExpertContent], activation: str
    ) -> None:
        self._activation_and_mul = ops.activation_and_mul
        self._kind = activation
        self._experts = experts
        self._contents = contents

    def change(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        shared_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return y with the rows of adapters recomputed.

        y [T, H]: output of this rank's experts without adapters for x [T, H]. Other arguments as of
        `quire.ops.moe.experts`.
        """
        for rows, content in self._contents.of_rows():
            total = torch.zeros(len(rows), x.shape[1])
            outputs = self._outputs(content, x[rows], ids[rows])
            for slot in range(ids.shape[1]):
                total += weights[rows, slot, None] * outputs[:, slot].float()
            if shared is not None:
                gate = 1.0 if shared_logits is None else shared_logits[rows].view(-1, 1).sigmoid()
                total += gate * shared[rows].float()
            y[rows] = total.to(y.dtype)
        return y

    def _outputs(self, content: ExpertContent, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [N, H], ids [N, k] → [N, k, H]."""
        outputs = x.new_zeros((*ids.shape, x.shape[1]))
        for expert in ids.unique().tolist():
            gate_up, down = self._experts.gate_up[expert], self._experts.down[expert]
            if gate_up is None or down is None:  # an expert of another rank
                continue
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            inner = gate_up.ungated(x[tokens])
            gate, up = inner.chunk(2, dim=1)
            for part, matrices in content.gate_up.get(expert, {}).items():
                _add(gate if part == "gate" else up, matrices, x[tokens])
            inner = self._activation_and_mul(inner, self._kind)
            found = down(inner)
            if (matrices := content.down.get(expert)) is not None:
                _add(found, matrices, inner)
            outputs[tokens, slots] = found
        return outputs


def _add(y: torch.Tensor, matrices: LowRank, x: torch.Tensor) -> None:
    y.copy_(y.float() + matrices.of(x))


class SharedExpert:
    """A network for every token, and the projection to the logit of its weight, if it has one."""

    def __init__(self, mlp: GatedMLP, gate: Linear | None) -> None:
        self.mlp, self.gate = mlp, gate

    def logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """x [T, H] → float32 [T, 1], None if the network has weight 1."""
        return None if self.gate is None else self.gate.weights.matrix(x, torch.float32)


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts. projection: to a logit of each. choice_bias, factors: numbers of experts, if
    `routing` has them."""

    routing: Routing
    projection: Linear
    choice_bias: ExpertNumbers | None
    factors: ExpertNumbers | None


class MixtureOfExperts:
    """Experts that a router chooses and weights for each token; x [T, H] → [T, H].

    Each rank has a range of the experts and the whole router.
    """

    def __init__(
        self,
        ops: OpSet,
        router: Router,
        experts: Experts,
        shared: SharedExpert | None,
        collectives: Collectives,
        adapted: AdaptedExperts | None,
        *,
        adds_shared: bool,
    ) -> None:
        """adds_shared: whether this rank adds the shared network to its sum; one of them does."""
        self._adapted = adapted
        self._adds_shared = adds_shared
        self.router = router.projection
        self.choice_bias, self.factors = router.choice_bias, router.factors
        self.experts, self.shared = experts, shared
        self._route = ops.route
        self._routing = router.routing
        self._collectives = collectives

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """routed [T, H]: input of the router, if not x."""
        logits = self.router.weights.matrix(x if routed is None else routed, torch.float32)
        ids, weights = self._route(
            logits, self._routing, _values(self.choice_bias), _values(self.factors)
        )
        shared = None if self.shared is None else self.shared.mlp(x)
        shared_logits = None if self.shared is None else self.shared.logits(x)
        if not self._adds_shared:
            shared = shared_logits = None
        is_alone = self._collectives.size == 1
        dtype = None if is_alone else torch.float32
        y = self.experts(
            x, ids, weights, shared=shared, shared_logits=shared_logits, out_dtype=dtype
        )
        if self._adapted is not None:
            y = self._adapted.change(y, x, ids, weights, shared, shared_logits)
        return y if is_alone else self._collectives.sum_rows(y, None, x.dtype)


def _values(numbers: ExpertNumbers | None) -> torch.Tensor | None:
    return None if numbers is None else numbers.values

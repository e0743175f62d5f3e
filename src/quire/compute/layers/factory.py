"""Makes layers, so that a model file states only which layers it has, never how they are computed.

Operations, dtype, device, formats of matrices and the rank's share of each layer are fixed here for
the whole model. Sizes in model files are those of the whole model. For a projection the file states
whether ranks share its outputs (column), its inputs (row) or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quire.base.errors import ConfigError, EngineError
from quire.compute.attention import PLAIN_SCORES, AttentionBackend, ScoreOptions
from quire.compute.layers import latent, moe
from quire.compute.layers.adapted import AdaptedLayers, AdaptedLinear, Additions, Projection
from quire.compute.layers.attention import Attention, Heads, Sinks
from quire.compute.layers.cache_bias import CacheBiases, WithoutBiases
from quire.compute.layers.embedding import (
    Embedding,
    LMHead,
    LogitParts,
    TiedEmbedding,
    TokenEmbedding,
    Vocabulary,
)
from quire.compute.layers.given import DeepStack, EmbeddingScale, GivenEmbeddings
from quire.compute.layers.linear import Linear, MergedLinear, PartialSums, RowLinear, Tree
from quire.compute.layers.mlp import MLP, AdaptedGate, ClassHeads, GatedMLP, ResidualBlock
from quire.compute.layers.norm import HeadNorm, LayerNorm, ResidualAdd, RMSNorm, SharedRMSNorm
from quire.compute.layers.recurrent import RecurrentLayers
from quire.compute.layers.rotary import Rotaries
from quire.compute.layers.scaling import OutputGate, OwnFactor, QueryGrowth, Scale, SoftCap
from quire.compute.layers.side import SideLayer, TokenSide
from quire.compute.layers.taps import StateTaps
from quire.compute.layers.token_columns import TokenColumn, TokenColumns
from quire.compute.layers.wanted import WantedTokens
from quire.compute.layers.weights import NO_ORDERS, Placement
from quire.compute.quantization import MatrixFormats, QuantizedFormats, WeightFormat
from quire.config.model_spec import ExpertsSpec, LatentSpec, MatrixShape
from quire.config.rope import RopeSpec
from quire.config.shard import NUM_PIECES, ONE_RANK, Shard, Share
from quire.ops import OpSet, PackedMatrix
from quire.ops.distributed import ALONE, Collectives

__all__ = ["LayerFactory"]


class LayerFactory:
    """Makes the layers of one model.

    attention: the backend of each layer, which is that of its layer group. max_positions: length of
    the rope tables. formats: formats of matrices; None keeps them in `dtype`. quantized_cache: K
    and V are stored in 8 bits, without the biases that attention can add. shard: the rank whose
    layers are made. collectives: its connection to the other ranks. columns: per-row facts that
    layers read. adapters: additions to the outputs of projections, or None. taps: readers of states
    between layers. rank_invariant: sums over inputs that ranks may share have the same bits on 1,
    2, 4 and 8 ranks.

    given: embeddings that requests bring; the token table reads them there. recurrent: makes layers
    with states. class_heads: makes heads for classes.
    """

    def __init__(
        self,
        ops: OpSet,
        attention: Mapping[int, AttentionBackend],
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        formats: MatrixFormats | None = None,
        *,
        quantized_cache: bool = False,
        shard: Shard = ONE_RANK,
        collectives: Collectives = ALONE,
        columns: TokenColumns | None = None,
        adapters: AdaptedLayers | None = None,
        taps: StateTaps | None = None,
        rank_invariant: bool = False,
    ) -> None:
        """Raises EngineError if `shard` and `collectives` disagree about the ranks."""
        if collectives.size != shard.size:
            raise EngineError(
                f"a rank of {shard.size} was given collectives of {collectives.size}; this is a bug"
            )
        self._ops = ops
        self._backends = attention
        self._dtype, self._device = dtype, device
        self._place = Placement(dtype, device)
        self._max_positions = max_positions
        self._plain = QuantizedFormats(None, ops)
        self._formats = formats or self._plain
        self._quantized_cache = quantized_cache
        self._shard, self._collectives = shard, collectives
        self._columns = columns or TokenColumns(ops)
        self._adapters = adapters
        self._taps = taps
        self._tree = Tree(NUM_PIECES // shard.size, ops.add) if rank_invariant else None
        self._sums = PartialSums(collectives, self._tree)
        self.given, self.parts = GivenEmbeddings(), LogitParts()
        self._rotaries = Rotaries(max_positions, device)
        self.recurrent = RecurrentLayers(ops, self._shard, self._place, self)
        self.class_heads = ClassHeads(ops, self._unquantized)

    def column(
        self, in_features: int, out_features: int, *, bias: bool, transposed: bool = False
    ) -> Projection:
        """Make a projection of whose outputs each rank has an equal part."""
        outputs = self._shard.equal(out_features, "outputs of a projection")
        return self._linear(in_features, outputs, bias=bias, transposed=transposed)

    def row(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        transposed: bool = False,
        unit: int = 1,
    ) -> Projection:
        """Make a projection of whose inputs each rank has an equal part, as a column projection
        before it produces them. Each rank has all outputs. unit: inputs that no two ranks share,
        such as those of a head."""
        chosen = self._formats.choose(MatrixShape(out_features, in_features))
        chosen = chosen.shared(in_features, unit)
        if self._shard.size == 1 and self._tree is None:
            whole = Share.whole(out_features)
            return self._linear(in_features, whole, chosen, bias=bias, transposed=transposed)
        inputs = self._shard.equal(in_features, "inputs of a projection")
        place = (self._place, self._sums)
        row = RowLinear(chosen, inputs, out_features, *place, bias=bias, transposed=transposed)
        if self._adapters is None:
            return row
        outputs, of_all_ranks = {"": Share.whole(out_features)}, self._collectives.all_reduce
        additions = self._adapters.additions(row.weights, inputs, outputs, of_all_ranks)
        return AdaptedLinear(row, additions)

    def replicated(
        self, in_features: int, out_features: int, *, bias: bool, transposed: bool = False
    ) -> Projection:
        """Make a projection that each rank has whole."""
        return self._linear(
            in_features, Share.whole(out_features), bias=bias, transposed=transposed
        )

    def merged_column(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        gate: str | None = None,
        fused: bool = False,
    ) -> Projection:
        """Make a merged projection; each rank has an equal part of each part's outputs. gate: see
        `MergedLinear`. fused: the parts are one tensor on disk."""
        shares = {part: self._shard.equal(size, f"{part} outputs") for part, size in parts.items()}
        on_disk = _parts(shares, fused=fused)
        chosen = self._formats.choose(_shape(shares, in_features))
        merged = MergedLinear(chosen, in_features, on_disk, self._place, bias=bias, gate=gate)
        additions = self._additions(merged, in_features, on_disk)
        if additions is None:
            return merged
        if gate is None:
            return AdaptedLinear(merged, additions)
        return AdaptedGate(self._ops, merged, additions, gate)

    def qkv_linear(
        self,
        in_features: int,
        attention: Attention,
        norm: RMSNorm | LayerNorm | None,
        *,
        bias: bool,
        fused: bool = False,
        pairs_neighbours: bool = False,
    ) -> Projection:
        """Make the projection to "q", "k" and "v" for `attention`; each rank has the outputs of its
        heads.

        norm: norm of the input, None if there is none. fused: the parts are one tensor on disk.
        pairs_neighbours: the two rows of a rotated pair of q or k are adjacent on disk.
        """
        return self._merged(
            in_features,
            _parts(attention.parts, fused=fused),
            self._qkv_format(in_features, attention, norm),
            bias=bias,
            orders=attention.orders_of_pairs() if pairs_neighbours else NO_ORDERS,
        )

    def gated_qkv_linear(self, in_features: int, attention: Attention) -> Projection:
        """Make the projection to gates, "q", "k" and "v" for `attention`, without biases. On disk
        the query and the gate of each head are adjacent in "q"."""
        parts = {**attention.parts, "q": attention.parts["q"].times(2)}
        return self.shared_linear(in_features, parts, orders={"q": attention.order_of_gates()})

    def headwise_qkv_linear(
        self, in_features: int, attention: Attention, norm: LayerNorm, *, bias: bool
    ) -> Projection:
        """Make it from one tensor on disk that has, for each kv head in turn, its query heads, k
        and v."""
        return self._merged(
            in_features,
            {"": attention.heads.by_kv_head},
            self._qkv_format(in_features, attention, norm),
            bias=bias,
            orders={"": attention.order_of_heads()},
        )

    def fused_qkv_linear(
        self,
        in_features: int,
        attention: Attention,
        norm: LayerNorm,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> Projection:
        """Make it from one tensor on disk with q, k and v of all heads side by side."""
        outputs = Share.joined(list(attention.heads.projections.values()))
        chosen = self._qkv_format(in_features, attention, norm)
        return self._linear(in_features, outputs, chosen, bias=bias, transposed=transposed)

    def shared_linear(
        self,
        in_features: int,
        parts: Mapping[str, Share],
        *,
        bias: bool = False,
        orders: Mapping[str, torch.Tensor] = NO_ORDERS,
        is_plain: bool = False,
    ) -> Projection:
        """Make a merged projection; each rank has its shares of the parts. orders: see
        `MergedLinear`. is_plain: keeps the model's dtype whatever the format of other matrices."""
        formats = self._plain if is_plain else self._formats
        chosen = formats.choose(_shape(parts, in_features))
        return self._merged(in_features, parts, chosen, bias=bias, orders=orders)

    def _linear(
        self,
        in_features: int,
        outputs: Share,
        chosen: WeightFormat | None = None,
        *,
        bias: bool,
        transposed: bool,
    ) -> Projection:
        chosen = chosen or self._formats.choose(MatrixShape(outputs.total, in_features))
        linear = Linear(chosen, in_features, outputs, self._place, bias=bias, transposed=transposed)
        return self._adapted(linear, in_features, {"": outputs})

    def _merged(
        self,
        in_features: int,
        parts: Mapping[str, Share],
        chosen: WeightFormat,
        *,
        bias: bool,
        orders: Mapping[str, torch.Tensor] = NO_ORDERS,
    ) -> Projection:
        merged = MergedLinear(chosen, in_features, parts, self._place, bias=bias, orders=orders)
        return self._adapted(merged, in_features, parts)

    def _adapted(
        self, layer: Linear | MergedLinear, in_features: int, shares: Mapping[str, Share]
    ) -> Projection:
        additions = self._additions(layer, in_features, shares)
        return layer if additions is None else AdaptedLinear(layer, additions)

    def _additions(
        self, layer: Linear | MergedLinear, in_features: int, shares: Mapping[str, Share]
    ) -> Additions | None:
        if self._adapters is None:
            return None
        return self._adapters.additions(layer.weights, Share.whole(in_features), shares)

    def _qkv_format(
        self, in_features: int, attention: Attention, norm: RMSNorm | LayerNorm | None
    ) -> WeightFormat:
        chosen = self._formats.choose(_shape(attention.parts, in_features))
        if not self._quantized_cache or norm is None:
            return chosen
        return WithoutBiases(chosen, attention.biases, norm)

    def embedding(self, num_rows: int, size: int, *, offset: int = 0) -> Embedding:
        """Make a table that each rank has whole, such as that of positions."""
        return Embedding(self._ops, num_rows, size, self._place, offset=offset)

    def embedding_and_head(
        self, vocab_size: int, size: int, *, tied: bool, head_bias: bool = False
    ) -> tuple[TokenEmbedding | TiedEmbedding, LMHead]:
        """Make the token table and the projection to logits, one matrix for both if tied. Each rank
        has a share of the tokens in both. head_bias: whether a separate projection has a bias."""
        self.given.width = size
        adapted = None if self._adapters is None else self._adapters.vocabulary(vocab_size, size)
        vocabulary = Vocabulary(
            vocab_size, self._shard, self._collectives, self.given, self.parts, adapted
        )
        head = self._formats.choose(MatrixShape(vocab_size, size, is_head=True))
        if tied:
            shared = TiedEmbedding(head, vocabulary, size, self._place)
            return shared, LMHead(shared, vocabulary)
        own = Linear(
            head, size, vocabulary.share, self._place, bias=head_bias, num_outputs=vocabulary.most
        )
        table = TokenEmbedding(self._ops, vocabulary, size, self._place)
        return table, LMHead(own, vocabulary)

    def token_embedding(self, vocab_size: int, size: int) -> TokenEmbedding:
        """Make the token table of a model without logits."""
        self.given.width = size
        vocabulary = Vocabulary(vocab_size, self._shard, self._collectives, self.given, self.parts)
        return TokenEmbedding(self._ops, vocabulary, size, self._place)

    def deep_stack(self, place: int) -> DeepStack:
        return DeepStack(self.given, place)

    def token_column(self, name: str) -> TokenColumn:
        """Make a column: a fact of each token, set anew for each forward."""
        return self._columns.column(name)

    def head_of(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
        """Pack a projection to logits [V, E] that is already loaded; each rank has it whole."""
        outputs, inputs = weight.shape
        return self._formats.choose(MatrixShape(outputs, inputs, is_head=True)).pack(weight, bias)

    def rms_norm(
        self, size: int, eps: float, *, offset: float = 0.0, part: str = "weight"
    ) -> RMSNorm:
        """part: see `RMSNorm`."""
        return RMSNorm(self._ops, size, eps, self._place, offset=offset, part=part)

    def layer_norm(
        self, size: int, eps: float, *, affine: bool = True, bias: bool = True, offset: float = 0.0
    ) -> LayerNorm:
        norm = LayerNorm(self._ops, size, eps, self._place, affine=affine, bias=bias, offset=offset)
        if self._adapters is not None and norm.bias is not None:
            norm.adapt(self._adapters.norm_biases(norm.weights))
        return norm

    def residual_add(self) -> ResidualAdd:
        return ResidualAdd(self._ops)

    def scale(self, factor: float, *, is_rounded: bool = True) -> Scale:
        """is_rounded: round the factor to the model's dtype."""
        return Scale(self._ops, factor, self._dtype if is_rounded else None)

    def embedding_scale(self, factor: float) -> EmbeddingScale:
        """Make the factor on rows of the token table, rounded to the model's dtype."""
        return EmbeddingScale(self.scale(factor), self.given)

    def output_gate(self) -> OutputGate:
        return OutputGate(self._ops)

    def soft_cap(self, cap: float) -> SoftCap:
        return SoftCap(self._ops, cap)

    def sinks(self, num_heads: int) -> Sinks:
        """One score for each query head of the model."""
        return Sinks(self._query_heads(num_heads), self._device)

    def alibi(self, slopes: Sequence[float]) -> ScoreOptions:
        """One slope for each query head of the model."""
        (own,) = self._query_heads(len(slopes)).ranges
        tensor = torch.tensor(
            slopes[own.start : own.stop], dtype=torch.float32, device=self._device
        )
        return ScoreOptions(alibi_slopes=tensor)

    def attention(
        self,
        layer: int,
        heads: tuple[int, int, int],
        *,
        scale: float | None = None,
        rope: RopeSpec | None = None,
        qk_norm_eps: float | None = None,
        qk_norm_offset: float = 0.0,
        qk_norm_over_row: bool = False,
        scores: ScoreOptions = PLAIN_SCORES,
        query_growth: tuple[float, int] | None = None,
        v_norm: bool = False,
        keys_are_values: bool = False,
        kv_layer: int | None = None,
    ) -> Attention:
        """Make the attention of one layer.

        heads: the model's numbers of query heads and kv heads, and head_dim. scale: default
        head_dim^-1/2. qk_norm_eps: set if q and k have norms; qk_norm_offset: difference between
        their weights and those on disk; qk_norm_over_row: they are over the row of all heads.
        query_growth: beta and length of `QueryGrowth`. v_norm: heads of V have a norm without a
        weight. keys_are_values, kv_layer: see `Attention`.
        """
        num_heads, num_kv_heads, head_dim = heads
        shared = Heads(self._query_heads(num_heads), self._shard.kv_heads(num_kv_heads), head_dim)
        backend = self._backends[layer if kv_layer is None else kv_layer]
        rotary = None if rope is None else self._rotaries.of(rope)
        biases = CacheBiases(
            shared.own,
            rotary,
            scores,
            # Attention adds a bias by the index of a key, which three axes do not follow.
            keys_normed=qk_norm_eps is not None or (rotary is not None and rotary.has_axes),
            added=backend.adds_biases,
        )
        norms: tuple[RMSNorm | SharedRMSNorm, ...] = ()
        if qk_norm_eps is not None and qk_norm_over_row:
            rows = (shared.projections["q"], shared.projections["k"])
            one = Share.whole(1)
            norms = tuple(self.shared_rms_norm(row, qk_norm_eps, one) for row in rows)
        elif qk_norm_eps is not None:
            has_keys = kv_layer in (None, layer)
            norms = tuple(
                self.rms_norm(head_dim, qk_norm_eps, offset=qk_norm_offset)
                for _ in range(1 + has_keys)
            )
        head_norm = None
        if v_norm:
            assert qk_norm_eps is not None, "norms of q, k and v have one eps"
            head_norm = HeadNorm(self._ops, head_dim, qk_norm_eps, self._place)
        return Attention(
            self._ops,
            backend,
            layer,
            shared,
            head_dim**-0.5 if scale is None else scale,
            rotary,
            biases,
            *norms,
            device=self._device,
            growth=self._growth(query_growth),
            kv_layer=kv_layer,
            keys_are_values=keys_are_values,
            v_norm=head_norm,
        )

    def latent_attention(
        self,
        layer: int,
        size: int,
        shape: tuple[int, LatentSpec],
        *,
        scale: float,
        rope: RopeSpec,
        bias: bool,
        pairs_neighbours: bool,
    ) -> latent.LatentAttention:
        """Make the latent attention of one layer. shape: number of query heads of the model, and
        sizes. scale: factor on q·k. bias: whether the projections of x have one. pairs_neighbours:
        see `qkv_linear`."""
        heads = latent.LatentHeads(self._query_heads(shape[0]), shape[1], pairs_neighbours)
        rank, query, query_norm = shape[1].query_rank, None, None
        if rank is not None:
            query_norm = self.rms_norm(rank, latent.LATENT_EPS)
            query = self.shared_linear(rank, heads.up, orders=heads.up_orders)
        down = self.shared_linear(size, heads.down, bias=bias, orders=heads.down_orders)
        norm = self.rms_norm(shape[1].rank, latent.LATENT_EPS)
        up = latent.LatentUp(self._ops, heads, self._place)
        parts = latent.LatentParts(down, query_norm, query, norm, up)
        place = (self._ops, self._backends[layer], self._rotaries.of(rope))
        return latent.LatentAttention(*place, layer, heads, scale, parts)

    def token_side(
        self, num_rows: int, size: int, side_size: int, num_layers: int, eps: float
    ) -> TokenSide:
        """Make per-layer embeddings. num_rows: rows of their table. side_size: width of a token's
        vector in one layer. Each rank has them whole."""
        total = side_size * num_layers
        scales = (
            self.scale(side_size**0.5),
            self.scale(size**-0.5, is_rounded=False),
            self.scale(2**-0.5, is_rounded=False),
        )
        return TokenSide(
            self._ops,
            self.embedding(num_rows, total),
            self.replicated(size, total, bias=False),
            self.rms_norm(side_size, eps),
            scales,
        )

    def side_layer(self, size: int, side_size: int, activation: str, eps: float) -> SideLayer:
        return SideLayer(
            self._ops,
            self.replicated(size, side_size, bias=False),
            self.replicated(side_size, size, bias=False),
            self.rms_norm(size, eps),
            activation,
        )

    def own_factor(self) -> OwnFactor:
        return OwnFactor(self._ops, self._place)

    def wanted_tokens(self, *, is_last: bool, layer: int | None = None) -> WantedTokens:
        """layer: number of the block, if the state that enters it may be tapped."""
        return WantedTokens(self._ops, self._columns, is_last=is_last, layer=layer, taps=self._taps)

    def residual_block(self, size: int, *, bias: bool) -> ResidualBlock:
        return ResidualBlock(self._ops, self.replicated(size, size, bias=bias))

    def gated_mlp(
        self,
        size: int,
        inner_size: int,
        activation: str,
        *,
        bias: bool = False,
        fused: bool = False,
    ) -> GatedMLP:
        """fused: gate and up are one tensor on disk."""
        parts = {"gate": inner_size, "up": inner_size}
        gate_up = self.merged_column(size, parts, bias=bias, gate=activation, fused=fused)
        return GatedMLP(gate_up, self.row(inner_size, size, bias=bias))

    def mixture_of_experts(
        self, size: int, spec: ExpertsSpec, activation: str
    ) -> moe.MixtureOfExperts:
        """Make a mixture of which each rank has a range of experts. The router keeps the model's
        dtype whatever the format of other matrices."""
        routing, inner = spec.routing, spec.inner_size
        (own,) = self._shard.in_units(routing.num_experts, 1, "experts").ranges
        shape = moe.ExpertsShape(routing.num_experts, size, inner, activation, spec.bias)
        experts = moe.Experts(self._ops, own, shape, self._formats, self._place)
        adapted = None
        if self._adapters is not None:
            contents = self._adapters.experts(experts.weights, size, inner)
            adapted = moe.AdaptedExperts(self._ops, experts, contents, activation)
        shared = None
        if spec.shared_size is not None:
            gate = self._unquantized(size, 1, bias=False) if spec.shared_gated else None
            mlp = self.gated_mlp(size, spec.shared_size, activation, fused=spec.shared_fused)
            shared = moe.SharedExpert(mlp, gate)
        router = moe.Router(
            routing,
            self._unquantized(size, routing.num_experts, bias=spec.bias),
            moe.ExpertNumbers(routing.num_experts, self._device) if routing.biased else None,
            moe.ExpertNumbers(routing.num_experts, self._device) if routing.has_factors else None,
        )
        return moe.MixtureOfExperts(
            self._ops,
            router,
            experts,
            shared,
            self._collectives,
            adapted,
            adds_shared=own.start == 0,
        )

    def _unquantized(self, in_features: int, out_features: int, *, bias: bool) -> Linear:
        chosen = self._plain.choose(MatrixShape(out_features, in_features))
        return Linear(chosen, in_features, Share.whole(out_features), self._place, bias=bias)

    def mlp(
        self, size: int, inner_size: int, activation: str, *, bias: bool, transposed: bool = False
    ) -> MLP:
        up = self.column(size, inner_size, bias=bias, transposed=transposed)
        down = self.row(inner_size, size, bias=bias, transposed=transposed)
        return MLP(self._ops, up, down, activation)

    def shared_rms_norm(self, share: Share, eps: float, groups: Share) -> SharedRMSNorm:
        """Make a norm over a dimension of which each rank has `share`. groups: see
        `SharedRMSNorm`. Raises ConfigError if its sums depend on the ranks, and must not."""
        if self._tree is not None and groups.total == 1:
            raise ConfigError(
                "rank_invariant=True: this model has norms over the heads of all ranks, whose sums "
                "depend on the number of ranks. Leave it out."
            )
        return SharedRMSNorm(self._ops, share, eps, self._place, self._collectives, groups)

    def _query_heads(self, total: int) -> Share:
        return self._shard.equal(total, "query heads")

    def _growth(self, wanted: tuple[float, int] | None) -> QueryGrowth | None:
        """Return the scaling of queries, None also if no position is far enough for it."""
        if wanted is None or self._max_positions <= wanted[1]:
            return None
        return QueryGrowth(self._ops, *wanted, self._max_positions, self._place)


def _shape(parts: Mapping[str, Share], in_features: int) -> MatrixShape:
    return MatrixShape(sum(share.total for share in parts.values()), in_features)


def _parts(shares: Mapping[str, Share], *, fused: bool) -> Mapping[str, Share]:
    """Return the parts of a merged projection; a single part without a name if they are one tensor
    on disk."""
    return {"": Share.joined(list(shares.values()))} if fused else shares

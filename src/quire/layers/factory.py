"""Makes layers, so that a model file names only what a layer is, never how it is computed.

Operations, dtype, device and the formats of matrices are fixed here for the whole model; the share
of a tensor-parallel rank will be decided here too, with no change to any model file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quire.attention import PLAIN_SCORES, AttentionBackend, ScoreOptions
from quire.config.model_spec import MatrixShape, RopeSpec
from quire.layers.attention import Attention
from quire.layers.cache_bias import CacheBiases, WithoutBiases
from quire.layers.embedding import Embedding, LMHead, TiedEmbedding
from quire.layers.given import GivenEmbeddings
from quire.layers.linear import Linear, MergedLinear
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.norm import LayerNorm, ResidualAdd, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.scaling import Scale, SoftCap
from quire.layers.wanted import WantedTokens
from quire.ops import OpSet
from quire.quantization import MatrixFormats, QuantizedFormats, WeightFormat

__all__ = ["LayerFactory"]


class LayerFactory:
    """attention: the backend of each layer, which is that of its layer group. max_positions:
    positions that a sequence may reach, the length of the rope tables. formats: in which matrices
    are kept; in `dtype` if None. quantized_cache: K and V are kept in 8 bits, without the biases
    that attention can add.

    given: embeddings that requests bring; the table of tokens reads them there.
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
    ) -> None:
        self._ops = ops
        self._backends = attention
        self._dtype, self._device = dtype, device
        self._max_positions = max_positions
        self._formats = formats or QuantizedFormats(None, ops)
        self._quantized_cache = quantized_cache
        self.given = GivenEmbeddings()
        self._rotaries: dict[RopeSpec, RotaryEmbedding] = {}

    def linear(
        self, in_features: int, out_features: int, *, bias: bool, transposed: bool = False
    ) -> Linear:
        return Linear(
            self._formats.choose(MatrixShape(out_features, in_features)),
            in_features,
            out_features,
            self._dtype,
            self._device,
            bias=bias,
            transposed=transposed,
        )

    def merged_linear(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool, gate: str | None = None
    ) -> MergedLinear:
        shape = MatrixShape(sum(parts.values()), in_features)
        return MergedLinear(
            self._formats.choose(shape),
            in_features,
            parts,
            self._dtype,
            self._device,
            bias=bias,
            gate=gate,
        )

    def qkv_linear(
        self, in_features: int, attention: Attention, norm: RMSNorm | LayerNorm, *, bias: bool
    ) -> MergedLinear:
        """Parts "q", "k", "v", for `attention`; norm: of the input."""
        num_heads, num_kv_heads, head_dim = attention.heads
        kv_size = num_kv_heads * head_dim
        parts = {"q": num_heads * head_dim, "k": kv_size, "v": kv_size}
        return MergedLinear(
            self._qkv_format(in_features, attention, norm),
            in_features,
            parts,
            self._dtype,
            self._device,
            bias=bias,
        )

    def fused_qkv_linear(self, in_features: int, attention: Attention, norm: LayerNorm) -> Linear:
        """The same as one tensor on disk, stored transposed, and with a bias (GPT-2's c_attn)."""
        num_heads, num_kv_heads, head_dim = attention.heads
        return Linear(
            self._qkv_format(in_features, attention, norm),
            in_features,
            (num_heads + 2 * num_kv_heads) * head_dim,
            self._dtype,
            self._device,
            bias=True,
            transposed=True,
        )

    def _qkv_format(
        self, in_features: int, attention: Attention, norm: RMSNorm | LayerNorm
    ) -> WeightFormat:
        num_heads, num_kv_heads, head_dim = attention.heads
        outputs = (num_heads + 2 * num_kv_heads) * head_dim
        chosen = self._formats.choose(MatrixShape(outputs, in_features))
        return WithoutBiases(chosen, attention.biases, norm) if self._quantized_cache else chosen

    def embedding(self, num_rows: int, size: int, *, offset: int = 0) -> Embedding:
        return Embedding(self._ops, num_rows, size, self._dtype, self._device, offset=offset)

    def embedding_and_head(
        self, vocab_size: int, size: int, *, tied: bool
    ) -> tuple[Embedding | TiedEmbedding, LMHead]:
        """The table of tokens and the projection to logits; one matrix for both if tied."""
        self.given.width = size
        head = self._formats.choose(MatrixShape(vocab_size, size, is_head=True))
        if tied:
            shared = TiedEmbedding(head, vocab_size, size, self._dtype, self._device, self.given)
            return shared, LMHead(shared)
        own = Linear(head, size, vocab_size, self._dtype, self._device, bias=False)
        table = Embedding(self._ops, vocab_size, size, self._dtype, self._device, given=self.given)
        return table, LMHead(own)

    def rms_norm(self, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        return RMSNorm(self._ops, size, eps, self._dtype, self._device, offset=offset)

    def layer_norm(
        self, size: int, eps: float, *, affine: bool = True, bias: bool = True
    ) -> LayerNorm:
        return LayerNorm(self._ops, size, eps, self._dtype, self._device, affine=affine, bias=bias)

    def residual_add(self) -> ResidualAdd:
        return ResidualAdd(self._ops)

    def scale(self, factor: float) -> Scale:
        return Scale(factor, self._dtype)

    def soft_cap(self, cap: float) -> SoftCap:
        return SoftCap(cap)

    def alibi(self, slopes: Sequence[float]) -> ScoreOptions:
        """One slope for each query head."""
        tensor = torch.tensor(slopes, dtype=torch.float32, device=self._device)
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
        scores: ScoreOptions = PLAIN_SCORES,
    ) -> Attention:
        """scale: default head_dim^-1/2. qk_norm_eps: set if q and k heads have norms;
        qk_norm_offset: by how much their weights are larger than on disk."""
        head_dim, backend = heads[2], self._backends[layer]
        rotary = None if rope is None else self._rotary(rope)
        biases = CacheBiases(
            heads,
            rotary,
            scores,
            # On three axes a key is not rotated by its index, by which attention adds a bias.
            keys_normed=qk_norm_eps is not None or (rotary is not None and rotary.has_axes),
            added=backend.adds_biases,
        )
        norms = (
            ()
            if qk_norm_eps is None
            else (
                self.rms_norm(head_dim, qk_norm_eps, offset=qk_norm_offset),
                self.rms_norm(head_dim, qk_norm_eps, offset=qk_norm_offset),
            )
        )
        return Attention(
            self._ops,
            backend,
            layer,
            heads,
            head_dim**-0.5 if scale is None else scale,
            rotary,
            biases,
            *norms,
        )

    def wanted_tokens(self, *, is_last: bool) -> WantedTokens:
        return WantedTokens(self._ops, is_last=is_last)

    def gated_mlp(
        self, size: int, inner_size: int, activation: str, *, bias: bool = False
    ) -> GatedMLP:
        parts = {"gate": inner_size, "up": inner_size}
        gate_up = self.merged_linear(size, parts, bias=bias, gate=activation)
        return GatedMLP(gate_up, self.linear(inner_size, size, bias=bias))

    def mlp(
        self,
        size: int,
        inner_size: int,
        activation: str,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> MLP:
        up = self.linear(size, inner_size, bias=bias, transposed=transposed)
        down = self.linear(inner_size, size, bias=bias, transposed=transposed)
        return MLP(self._ops, up, down, activation)

    def _rotary(self, rope: RopeSpec) -> RotaryEmbedding:
        """Layers of one kind share one pair of tables."""
        if rope not in self._rotaries:
            self._rotaries[rope] = RotaryEmbedding(rope, self._max_positions, self._device)
        return self._rotaries[rope]

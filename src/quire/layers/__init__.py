"""Layers: the parts that model files are built of. A constructor takes exactly what the layer
uses."""

from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, LMHead, LogitParts, TiedEmbedding
from quire.layers.factory import LayerFactory
from quire.layers.given import GivenEmbeddings
from quire.layers.latent import LatentAttention
from quire.layers.linear import Linear, MergedLinear
from quire.layers.mlp import MLP, GatedMLP, ResidualBlock
from quire.layers.moe import MixtureOfExperts
from quire.layers.norm import LayerNorm, ResidualAdd, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.scaling import Scale
from quire.layers.side import TokenSide
from quire.layers.taps import StateTaps
from quire.layers.token_columns import TokenColumn, TokenColumns
from quire.layers.wanted import WantedTokens
from quire.layers.weights import LayerWeights, WeightedLayer

__all__ = [
    "MLP",
    "Attention",
    "Embedding",
    "GatedMLP",
    "GivenEmbeddings",
    "LMHead",
    "LatentAttention",
    "LayerFactory",
    "LayerNorm",
    "LayerWeights",
    "Linear",
    "LogitParts",
    "MergedLinear",
    "MixtureOfExperts",
    "RMSNorm",
    "ResidualAdd",
    "ResidualBlock",
    "RotaryEmbedding",
    "Scale",
    "StateTaps",
    "TiedEmbedding",
    "TokenColumn",
    "TokenColumns",
    "TokenSide",
    "WantedTokens",
    "WeightedLayer",
]

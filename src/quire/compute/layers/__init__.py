"""Layers: the parts that model files are built of. A constructor takes exactly what the layer
uses."""

from quire.compute.layers.attention import Attention
from quire.compute.layers.embedding import Embedding, LMHead, LogitParts, TiedEmbedding
from quire.compute.layers.factory import LayerFactory
from quire.compute.layers.given import GivenEmbeddings
from quire.compute.layers.latent import LatentAttention
from quire.compute.layers.linear import Linear, MergedLinear
from quire.compute.layers.mlp import MLP, GatedMLP, ResidualBlock
from quire.compute.layers.moe import MixtureOfExperts
from quire.compute.layers.norm import LayerNorm, ResidualAdd, RMSNorm
from quire.compute.layers.rotary import RotaryEmbedding
from quire.compute.layers.scaling import Scale
from quire.compute.layers.side import TokenSide
from quire.compute.layers.taps import StateTaps
from quire.compute.layers.token_columns import TokenColumn, TokenColumns
from quire.compute.layers.wanted import WantedTokens
from quire.compute.layers.weights import LayerWeights, WeightedLayer

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

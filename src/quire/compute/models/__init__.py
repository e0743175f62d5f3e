"""Models: one file per family, named by the architecture in config.json."""

from quire.compute.models.causal_lm import CausalLM, Classifies, ModelFactory
from quire.compute.models.loader import LoadFormat, check_replacements, load_model, load_tower
from quire.compute.models.registry import ARCHITECTURES, find_model
from quire.compute.models.weight_map import WeightMap, WeightTarget

__all__ = [
    "ARCHITECTURES",
    "CausalLM",
    "Classifies",
    "LoadFormat",
    "ModelFactory",
    "WeightMap",
    "WeightTarget",
    "find_model",
    "check_replacements",
    "load_model",
    "load_tower",
]

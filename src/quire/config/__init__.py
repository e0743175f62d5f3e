"""Settings and what a checkpoint says about itself. Nothing here imports torch."""

from quire.config.checkpoint import Checkpoint, TensorInfo, find_weight_files, read_checkpoint
from quire.config.families import SUPPORTED_ARCHITECTURES
from quire.config.families.reader import read_model_spec
from quire.config.generation import read_generation_defaults
from quire.config.hf import RawConfig, read_json
from quire.config.hub import resolve_model_folder
from quire.config.kv_layout import KVGroup, KVLayout, group_layers
from quire.config.model_spec import GenerationDefaults, MatrixShape, ModelSpec, ParameterCounts
from quire.config.rope import RopeSpec

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "Checkpoint",
    "GenerationDefaults",
    "KVGroup",
    "KVLayout",
    "MatrixShape",
    "ModelSpec",
    "ParameterCounts",
    "RawConfig",
    "RopeSpec",
    "TensorInfo",
    "find_weight_files",
    "group_layers",
    "read_checkpoint",
    "read_generation_defaults",
    "read_json",
    "read_model_spec",
    "resolve_model_folder",
]

"""Any causal model that `transformers` knows, read by a process that asks that library."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.config import env
from quire.config.hf import RawConfig
from quire.config.model_spec import GenericTraits, MatrixShape, ModelSpec, ParameterCounts

__all__ = ["has_transformers", "read_generic", "spec_of"]

_log = logging.getLogger("quire.config")
PROBE = "quire.compute.models.generic.probe"
PROBE_SECONDS = 300.0
FACTS_VERSION = 2
"""Changes when the probe finds other facts."""


def has_transformers() -> bool:
    """Return whether `transformers` is installed."""
    return find_spec("transformers") is not None


def read_generic(raw: RawConfig, folder: Path, dtype: str) -> ModelSpec:
    """Return the spec of a model that `transformers` computes, except attention. The library runs
    in a process of its own, so this one needs neither it nor torch.
    Raises ConfigError with the reason for a model that it would compute wrongly."""
    if not has_transformers():
        raise ConfigError(
            "model_impl='transformers' needs that library in quire's environment: "
            "pip install 'transformers>=5.24,<6'"
        )
    facts = _known(folder, raw)
    if "refused" in facts:
        raise ConfigError(f"{raw.source}: transformers cannot serve this model: {facts['refused']}")
    _log.warning("%s: generic, slower: transformers computes all but attention", raw.source)
    return spec_of(facts, raw, dtype)


def spec_of(facts: dict[str, Any], raw: RawConfig, dtype: str) -> ModelSpec:
    """Spec from what `quire.compute.models.generic.probe` found. Raises ConfigError for layers that
    the cache cannot hold."""
    layers: list[dict[str, Any]] = facts["layers"]
    shapes = {(each["heads"], each["kv_heads"], each["head_dim"]) for each in layers}
    if len(shapes) > 1:
        raise ConfigError(
            f"{raw.source}: transformers cannot serve this model: its layers differ in their heads"
        )
    ((num_heads, num_kv_heads, head_dim),) = shapes
    matrices = tuple(MatrixShape(*matrix) for matrix in facts["matrices"])
    max_context: int | None = facts["max_positions"]
    if max_context is None:
        raise ConfigError(f"{raw.source}: key 'max_position_embeddings' is missing; add it")
    options = ("soft_cap", "sinks")
    widest = max((shape.outputs for shape in matrices if not shape.is_head), default=1)
    return ModelSpec(
        architecture="",
        model_type=facts["model_type"],
        vocab_size=facts["vocab_size"],
        hidden_size=facts["hidden_size"],
        intermediate_size=widest,
        num_layers=len(layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation="silu",
        norm_eps=0.0,
        max_context=max_context,
        tie_word_embeddings=facts["tied"],
        dtype=dtype,
        windows=tuple(each["window"] or None for each in layers),
        ropes=(None,) * len(layers),
        traits=GenericTraits(),
        parameters=ParameterCounts(facts["num_parameters"], 0, 0),
        matrices=matrices,
        score_options=frozenset(name for name in options if any(each[name] for each in layers)),
        bos_token_id=next(iter(raw.read_ids("bos_token_id")), None),
        eos_token_ids=raw.read_ids("eos_token_id"),
        pad_token_id=raw.read_optional(int, "pad_token_id"),
    )


def _known(folder: Path, raw: RawConfig) -> dict[str, Any]:
    """Facts of the folder, which are kept for the next start: the library takes seconds to load."""
    asked = json.dumps([raw.as_dict(), version("transformers"), FACTS_VERSION], sort_keys=True)
    name = hashlib.sha256(asked.encode()).hexdigest()
    file = env.cache_folder() / "generic" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))
    facts = _ask(folder, raw)
    if "refused" in facts:
        return facts  # a newer start may find another reason
    with contextlib.suppress(OSError):  # a folder that cannot be written costs time alone
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_suffix(f".{os.getpid()}.tmp")
        staged.write_text(json.dumps(facts), encoding="utf-8")
        staged.replace(file)
    return facts


def _ask(folder: Path, raw: RawConfig) -> dict[str, Any]:
    """Facts that the probe prints. Raises ConfigError if it ends without."""
    command = [sys.executable, "-m", PROBE, str(folder)]
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, env=quiet
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{raw.source}: transformers did not describe the model in {PROBE_SECONDS:.0f} s; the "
            "machine has too much else to do, or the model is endless"
        ) from error
    if ended.returncode != 0 or not ended.stdout.strip():
        silent = f"its process ended with status {ended.returncode}; it may lack memory"
        reason = (ended.stderr.strip().splitlines() or [silent])[-1]
        raise ConfigError(f"{raw.source}: transformers cannot describe the model: {reason}")
    return json.loads(ended.stdout.strip().splitlines()[-1])

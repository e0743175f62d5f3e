"""Makes a plan from settings, reading no more of a checkpoint than its headers."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.platform import Platform
from quire.config import env
from quire.config.checkpoint import Checkpoint, read_checkpoint
from quire.config.families.reader import read_model_spec
from quire.config.gguf import is_gguf
from quire.config.hf import read_json
from quire.config.hub import local_folder, resolve_model_folder
from quire.config.media.images import find_images
from quire.config.media.registry import with_tower
from quire.config.model_spec import ModelSpec
from quire.config.resolve import Resolved, resolve
from quire.config.settings import EngineSettings
from quire.config.speculation.draft_model import draft_folder, find_draft

_log = logging.getLogger("quire.config")

__all__ = [
    "FoundModel",
    "StartupPlan",
    "check_early",
    "fetch",
    "find_model",
    "lacks_weights",
    "plan_startup",
    "with_threads",
]


@dataclass(frozen=True, slots=True)
class StartupPlan:
    """folder: local folder of the checkpoint. asked: settings before they were resolved.
    checkpoint: headers of the weight files; None if weights are made up."""

    folder: Path
    asked: EngineSettings
    resolved: Resolved
    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True)
class FoundModel:
    """folder: local folder of the checkpoint. spec: its description of the model."""

    folder: Path
    spec: ModelSpec


def find_model(settings: EngineSettings) -> FoundModel:
    """Find the model and read its config. Raises ConfigError: none named, not found, not known."""
    if settings.model is None:
        raise ConfigError("Setting model is None here. Name a folder or a Hugging Face id.")
    folder = resolve_model_folder(settings.model, settings.revision, settings.download_dir)
    with_sampling = settings.generation_config != "none"
    overrides = None if settings.hf_overrides is None else json.loads(settings.hf_overrides)
    spec = read_model_spec(
        folder,
        with_sampling=with_sampling,
        overrides=overrides,
        dtype_is_chosen=settings.dtype != "auto",
        implementation=settings.model_impl,
        longest=settings.max_model_len,
    )
    images = find_images(folder, spec, settings)
    if images is None and not settings.enable_prompt_embeds:
        spec = spec.on_one_axis()
    return FoundModel(folder, replace(spec, images=images))


def lacks_weights(folder: Path) -> bool:
    """Return whether a folder has a config.json that says all of the model's sizes, and no weights
    of any kind. Those of a quantized model are as its files have them."""
    if is_gguf(folder) or any(folder.glob("*.safetensors*")) or any(folder.glob("*.bin")):
        return False
    return read_json(folder / "config.json").section("quantization_config") is None


def fetch(settings: EngineSettings) -> None:
    """Fetch what is not on this machine yet of the model, and of one that drafts for it. Raises
    ConfigError: not found, no network."""
    if settings.model is not None:
        resolve_model_folder(settings.model, settings.revision, settings.download_dir)
    draft_folder(settings)


def check_early(settings: EngineSettings) -> None:
    """Refuse what nothing of the model is needed for, before it is said that it loads. Raises
    ConfigError: a folder that is none of a model, or a variable that would be read has no meaning.
    """
    if settings.model is not None:
        local_folder(settings.model)
    env.check_kernels()
    if settings.num_threads is None:
        env.num_threads()


def with_threads(settings: EngineSettings, platform: Platform) -> EngineSettings:
    """The settings, with `num_threads` by OMP_NUM_THREADS where only that is given. It is often set
    for a whole machine, of which a container has a few cores. Raises ConfigError if it is none."""
    if settings.num_threads is not None or (wanted := env.num_threads()) is None:
        return settings
    return replace(settings, num_threads=min(wanted, platform.cpu.num_cores))


def _tell_left_out(found: FoundModel, checkpoint: Checkpoint) -> None:
    for note in checkpoint.left_out:
        _log.warning("%s", note)
    others = checkpoint.others
    if others and found.spec.images is None:
        _log.warning(
            "%s: only the text model is read; %d other tensors, such as %r, are left out",
            found.folder,
            len(others),
            next(iter(others)),
        )


def plan_startup(settings: EngineSettings, platform: Platform) -> StartupPlan:
    """Find the model, read what it says about itself and resolve the settings.

    Raises ConfigError: no model named, not found, unsupported, broken, or larger than the machine;
    or a variable of the environment names kernels that do not exist.
    """
    env.check_kernels()
    found = find_model(settings)
    settings = with_threads(settings, platform)
    checkpoint = None if settings.load_format == "dummy" else read_checkpoint(found.folder)
    if checkpoint is not None:
        _tell_left_out(found, checkpoint)
        checkpoint = with_tower(checkpoint, found.spec.images)
    draft = find_draft(settings, found.spec, found.folder, checkpoint)
    resolved = resolve(settings, found.spec, checkpoint, platform, draft)
    return StartupPlan(found.folder, settings, resolved, checkpoint)

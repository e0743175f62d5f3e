"""Everything about a checkpoint that a front must know to turn text into requests and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config import ModelSpec, resolve_model_folder
from quire.config.settings import EngineSettings
from quire.config.startup import StartupPlan
from quire.rendering.renderer import Renderer

__all__ = ["ModelText", "load_model_text"]


@dataclass(frozen=True, slots=True)
class ModelText:
    """eos_token_ids: what ends a sequence. default_sampling: sampling parameters that the model's
    authors recommend. seed: of the seeds of requests that name none."""

    renderer: Renderer
    eos_token_ids: frozenset[int]
    default_sampling: Mapping[str, object]
    seed: int | None = None


def load_model_text(settings: EngineSettings, plan: StartupPlan) -> ModelText:
    """Load tokenizer and chat template of the planned model. ConfigError if they are broken."""
    resolved, folder = plan.resolved, plan.folder
    if settings.tokenizer is not None:
        folder = resolve_model_folder(settings.tokenizer, settings.revision, settings.download_dir)
    renderer = Renderer.from_folder(
        folder,
        vocab_size=resolved.spec.vocab_size,
        skip_tokenizer_init=resolved.settings.skip_tokenizer_init,
        chat_template=settings.chat_template,
    )
    defaults = {} if resolved.settings.generation_config == "none" else _defaults(resolved.spec)
    return ModelText(
        renderer, _eos_token_ids(resolved.spec, renderer), defaults, resolved.settings.seed
    )


def _eos_token_ids(spec: ModelSpec, renderer: Renderer) -> frozenset[int]:
    """The tokens of the checkpoint's configs and the tokenizer's own, which in a chat model may be
    the only one that ends a turn."""
    own = None if renderer.tokenizer is None else renderer.tokenizer.eos_token_id
    return frozenset((*spec.eos_token_ids, *(() if own is None else (own,))))


def _defaults(spec: ModelSpec) -> Mapping[str, object]:
    """The checkpoint's generation_config.json, as sampling parameters."""
    stated = spec.generation
    values: dict[str, object] = {
        "temperature": stated.temperature,
        "top_p": stated.top_p,
        "top_k": stated.top_k,
        "min_p": stated.min_p,
        "repetition_penalty": stated.repetition_penalty,
        "max_tokens": stated.max_new_tokens,
    }
    return {name: value for name, value in values.items() if value is not None}

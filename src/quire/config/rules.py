"""Combinations of settings, model and machine that cannot be computed, with the way out of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.config.model_spec import DTYPE_BYTES, GenericTraits, ModelSpec
from quire.config.packed import PackedLayout
from quire.config.packed.choices import holds_integers
from quire.config.settings import EngineSettings
from quire.config.speculation.draft_model import Draft

__all__ = ["Case", "check_rules"]


@dataclass(frozen=True, slots=True)
class Case:
    """A start as the rules see it. layouts: quantized matrices of the checkpoint. device: the one
    that was chosen."""

    settings: EngineSettings
    spec: ModelSpec
    layouts: Sequence[PackedLayout]
    device: str
    draft: Draft | None


@dataclass(frozen=True, slots=True)
class Rule:
    """breaks: returns whether a case breaks it. message: says what, and what to do."""

    breaks: Callable[[Case], bool]
    message: str | Callable[[Case], str]


def check_rules(case: Case) -> None:
    """Raise ConfigError with the message of the first rule that a start breaks."""
    for rule in RULES:
        if rule.breaks(case):
            words = rule.message
            raise ConfigError(words if isinstance(words, str) else words(case))


def _of_kv_alone(case: Case) -> str | None:
    """Return the first setting that changes K and V alone, with its value."""
    settings = case.settings
    given = {
        "kv_cache_dtype": settings.kv_cache_dtype if settings.kv_cache_dtype != "auto" else None,
        "kv_cache_memory": settings.kv_cache_memory,
        "swap_space": settings.swap_space or None,
    }
    return next((f"{name}={value}" for name, value in given.items() if value is not None), None)


def _widened(case: Case) -> list[PackedLayout]:
    """Return the matrices that no kernel multiplies as they are."""
    if case.settings.quantization is not None:
        return []
    return [layout for layout in case.layouts if layout.kernel_on(case.device) is None]


def _widened_message(case: Case) -> str:
    widened = _widened(case)
    return (
        f"batch_invariant=True: {len(widened)} matrices in {widened[0].scheme.name}, such as "
        f"{widened[0].module}, are widened as they are used and multiplied by torch, whose "
        "sums may depend on the batch. Give quantization='int8', or leave it out."
    )


def _holds_integers(case: Case) -> bool:
    return holds_integers(case.settings, case.layouts, case.device)


def _no_tokens_message(case: Case) -> str:
    kind = "encoders" if case.spec.is_encoder else "models without a head for logits"
    return (
        f"enable_lora=True with {case.spec.architecture}: {kind} take no adapters. Leave it out, "
        "or merge the adapter into the model."
    )


RULES = (
    Rule(
        lambda case: case.settings.batch_invariant and case.settings.torch_compile,
        (
            "batch_invariant=True and torch_compile=True do not go together: what torch "
            "compiles may sum in an order that depends on the batch. Leave one of them out."
        ),
    ),
    Rule(
        lambda case: case.settings.batch_invariant and bool(_widened(case)),
        _widened_message,
    ),
    Rule(
        lambda case: case.settings.activation_bits == 8 and not _holds_integers(case),
        (
            "activation_bits=8: no matrix of this model is integers in memory, and others are "
            "multiplied by activations as they are. Give quantization='int8', or leave it out."
        ),
    ),
    Rule(
        lambda case: (
            case.settings.activation_bits == 16 and case.device != "cpu" and _holds_integers(case)
        ),
        lambda case: (
            f"activation_bits=16 on {case.device}: matrices of integers take 16 bits on CPUs alone "
            "so far. Give device='cpu', or leave it out."
        ),
    ),
    Rule(
        lambda case: case.settings.batch_invariant and isinstance(case.spec.traits, GenericTraits),
        (
            "batch_invariant=True: transformers computes this model, by sums that may "
            "depend on the batch. Leave it out, or use an architecture of quire's own."
        ),
    ),
    Rule(
        lambda case: case.settings.enable_prompt_embeds and bool(case.spec.side_size),
        (
            "enable_prompt_embeds=True: layers of this model read a vector of each "
            "token's id, and an embedding has no id. Leave it out."
        ),
    ),
    Rule(
        lambda case: case.settings.enable_lora and case.device != "cpu",
        lambda case: (
            f"enable_lora=True on {case.device}: LoRA runs on CPUs alone so far. Give "
            "device='cpu', or merge the adapter into the model."
        ),
    ),
    Rule(
        lambda case: case.settings.enable_lora and not case.spec.draws_tokens,
        _no_tokens_message,
    ),
    Rule(
        lambda case: (
            case.settings.tensor_parallel_size == 1
            and case.settings.distributed_executor_backend == "ray"
        ),
        (
            "distributed_executor_backend='ray' places ranks, and tensor_parallel_size "
            "is 1: leave it out, or give a larger size."
        ),
    ),
    Rule(
        lambda case: bool(case.spec.states) and case.device != "cpu",
        lambda case: (
            f"{case.spec.architecture} on {case.device}: models with recurrent states run "
            "on CPUs alone so far. Give device='cpu'."
        ),
    ),
    Rule(
        lambda case: case.spec.latent is not None and case.device != "cpu",
        lambda case: (
            f"{case.spec.architecture} on {case.device}: models with latent attention run on CPUs "
            "alone so far. Give device='cpu'."
        ),
    ),
    Rule(
        lambda case: (
            case.spec.latent is not None
            and case.settings.kv_cache_dtype not in ("auto", "int8", *DTYPE_BYTES)
        ),
        lambda case: (
            f"kv_cache_dtype={case.settings.kv_cache_dtype!r} with {case.spec.architecture}: "
            "vectors of latent attention are not kept in float8. Give 'int8', or leave it out."
        ),
    ),
    Rule(
        lambda case: not case.spec.has_kv and bool(_of_kv_alone(case)),
        lambda case: (
            f"{_of_kv_alone(case)} with {case.spec.architecture}: no layer has K and V, and states "
            "keep their dtype. Leave it out."
        ),
    ),
    Rule(
        lambda case: case.draft is not None and case.device != "cpu",
        lambda case: (
            f"speculative_config names a draft model on {case.device}: draft models run "
            "on CPUs alone so far. Give device='cpu', or method='auto'."
        ),
    ),
)
"""All, in the order in which they are checked."""

"""Classes into which encoders and decoders sort prompts (`…ForSequenceClassification`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from quire.base.errors import ConfigError
from quire.config.hf import RawConfig
from quire.config.model_spec import ClassesSpec, ModelSpec

if TYPE_CHECKING:  # numpy comes with it
    from quire.protocol.pooling_params import ClassActivation

__all__ = ["read_classes", "with_answers", "with_classes"]

DEFAULT_LABELS = 2
"""Classes of a config.json that names none, as `transformers` has it."""
ANSWERS = "classifier_from_token"
"""Key of the two tokens, "no" and "yes", that vLLM's `hf_overrides` name for Qwen3-Reranker."""


def with_classes(
    read: Callable[[RawConfig, str], ModelSpec],
) -> Callable[[RawConfig, str], ModelSpec]:
    """Return the reader of a family's decoders with a head for classes in place of the one for
    logits. They tell by the last token."""

    def read_with_classes(raw: RawConfig, dtype: str) -> ModelSpec:
        spec = read(raw, dtype)
        classes = replace(read_classes(raw), pooling="classify_last")
        if raw.has(ANSWERS):  # the head for logits stays
            return replace(spec, classes=replace(classes, labels=("yes",), activation="sigmoid"))
        head = spec.hidden_size * (1 + len(classes.labels))
        return replace(
            spec,
            classes=classes,
            tie_word_embeddings=False,
            parameters=replace(spec.parameters, head=head),
            matrices=tuple(each for each in spec.matrices if not each.is_head),
        )

    return read_with_classes


def with_answers(spec: ModelSpec, raw: RawConfig, folder: Path) -> ModelSpec:
    """Return the description with the token ids of the answers, where config.json names them.
    ConfigError if they are not two tokens of the tokenizer."""
    if not raw.has(ANSWERS) or spec.classes is None:
        return spec
    words = raw.read_list(str, ANSWERS) or ()
    known = _vocabulary(folder / "tokenizer.json")
    ids = [known[word] for word in words if word in known]
    if len(words) != 2 or len(ids) != 2:
        raise ConfigError(
            f"{raw.source}: {ANSWERS}={list(words)!r} is to name two tokens of {folder}'s "
            'tokenizer, such as ["no", "yes"]'
        )
    return replace(spec, classes=replace(spec.classes, answers=(ids[0], ids[1])))


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); fetch the file again") from error
    return cast("dict[str, int]", found) if isinstance(found, dict) else {}


def read_classes(raw: RawConfig) -> ClassesSpec:
    """Read labels, and what makes probabilities and scores of a model's numbers."""
    named = raw.section("id2label")
    labels = [] if named is None else [named.read(str, key) for key in sorted(named, key=_number)]
    count = len(labels) or raw.read_size("num_labels", default=DEFAULT_LABELS)
    labels = labels or [f"LABEL_{index}" for index in range(count)]
    problem = raw.read_choice(
        ("single_label_classification", "multi_label_classification", "regression"),
        "problem_type",
        default="single_label_classification",
    )
    activation: ClassActivation = "softmax" if count > 1 else "sigmoid"
    if problem == "multi_label_classification":
        activation = "sigmoid"
    elif problem == "regression":
        activation = "none"
    return ClassesSpec(tuple(labels), activation, _read_score_activation(raw))


def _number(key: str) -> int:
    return int(key) if key.isdecimal() else 0


def _read_score_activation(raw: RawConfig) -> Literal["sigmoid", "none"]:
    """Return the function that sentence-transformers applies to the number of a cross-encoder: the
    one of torch whose class its files name, and the sigmoid where they name none."""
    own = raw.section("sentence_transformers")
    name = None if own is None else own.read_optional(str, "activation_fn")
    name = name or raw.read_optional(str, "sbert_ce_default_activation_function") or "Sigmoid"
    kind = name.rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise raw.unsupported("activation_fn", name, ("Sigmoid", "Identity"))
    return "sigmoid" if kind == "Sigmoid" else "none"

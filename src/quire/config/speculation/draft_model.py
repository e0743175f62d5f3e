"""A draft model: found, read and checked against the model whose tokens it guesses."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.config.checkpoint import Checkpoint, read_checkpoint
from quire.config.families.reader import read_model_spec
from quire.config.hub import resolve_model_folder
from quire.config.kv_layout import KVLayout
from quire.config.memory.plan import (
    activation_bytes,
    capture_bytes,
    logits_bytes,
    weight_bytes,
)
from quire.config.model_spec import ModelSpec
from quire.config.settings import EngineSettings
from quire.config.speculation.heads import HEAD_FILES, DraftHeads, find_heads
from quire.config.speculation.mtp import MTPDraft, find_mtp
from quire.config.speculation.settings import FILE_HEADS, MTP, OF_MODELS, parse_speculation

__all__ = ["Draft", "DraftModel", "draft_folder", "find_draft"]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """folder: local folder of its checkpoint. checkpoint: headers of the weight files; None if
    weights are made up."""

    folder: Path
    spec: ModelSpec
    checkpoint: Checkpoint | None
    is_cut = False

    @property
    def name(self) -> str:
        """Folder, for the report."""
        return self.folder.name

    def with_dtype(self, dtype: str) -> DraftModel:
        """The same in the dtype of the computation."""
        return replace(self, spec=replace(self.spec, dtype=dtype))

    def weight_bytes(self, quantization: str | None) -> int:
        """Weights in memory."""
        return weight_bytes(self.spec, self.checkpoint, quantization)

    def step_bytes(self, step_tokens: int, num_seqs: int) -> int:
        """Bytes of captured steps, or of others, beside weights and K/V."""
        captured = capture_bytes(self.spec, 0, step_tokens)
        activations = max(activation_bytes(self.spec, step_tokens), captured)
        return activations + logits_bytes(self.spec, num_seqs)

    def page_bytes(self, layout: KVLayout) -> int:
        """Bytes of each block of `layout`, which is the target's, for the draft model's K/V."""
        return KVLayout.of_draft(self.spec, layout).page_bytes


Draft = DraftModel | DraftHeads | MTPDraft
"""Weights that guess tokens. `is_cut`: whether ranks share them."""


def draft_folder(settings: EngineSettings) -> Path | None:
    """Return the folder of the model, or the heads, that draft, fetched if needed; None if the
    settings name none. Raises ConfigError: not found, no network."""
    speculation = parse_speculation(settings.speculative_config)
    if speculation is None or speculation.model is None:
        return None
    more = HEAD_FILES if speculation.method in FILE_HEADS else ()
    return resolve_model_folder(speculation.model, None, settings.download_dir, more)


def find_draft(
    settings: EngineSettings,
    target: ModelSpec,
    target_folder: Path,
    target_checkpoint: Checkpoint | None,
) -> Draft | None:
    """Find the draft model, the heads or the MTP layer of the settings; None if they name none.
    target: the model that they draft for, with its folder, and headers of its files unless weights
    are made up. Raises ConfigError: not found, not known, or not usable beside the target."""
    speculation = parse_speculation(settings.speculative_config)
    if speculation is None or speculation.method not in OF_MODELS:
        return None
    method = speculation.method
    _check_reading(settings, target, method)
    if method == MTP:
        return find_mtp(target, target_folder, target_checkpoint, settings.tensor_parallel_size)
    folder = draft_folder(settings)
    assert folder is not None, f"{method} has files of its own"
    if method in FILE_HEADS:
        return find_heads(method, folder, speculation.num_speculative_tokens, target)
    spec = read_model_spec(
        folder, dtype_is_chosen=True, longest=settings.max_model_len or target.max_context
    )
    _check(settings, spec, target)
    _check_tokens(folder, target_folder)
    checkpoint = None if settings.load_format == "dummy" else read_checkpoint(folder)
    return DraftModel(folder, spec, checkpoint)


def _check_reading(settings: EngineSettings, target: ModelSpec, method: str) -> None:
    """Refuse a target whose tokens alone do not say what comes next, and one whose adapters may
    change the table of tokens for a layer that reads it."""
    reason = None
    if all(window is not None for window in target.attention_windows):
        reason = "needs a layer with full attention in the model, which has none"
    elif target.prompt_attention == "bidirectional":
        reason = "is not offered where a prompt's tokens see all of it"
    elif (target.images is None and target.position_axes > 1) or settings.enable_prompt_embeds:
        reason = "reads tokens alone: it is not offered beside media and prompt_embeds"
    elif settings.enable_lora and method not in ("draft_model", "medusa", MTP):
        reason = (
            "reads the model's own table of tokens, which adapters may change: leave enable_lora "
            "out, or take method='auto'"
        )
    if reason is not None:
        raise ConfigError(f"speculative_config: method={method!r} {reason}.")


def _check(settings: EngineSettings, draft: ModelSpec, target: ModelSpec) -> None:
    reason = None
    if draft.vocab_size != target.vocab_size:
        reason = (
            f"has {draft.vocab_size:,} tokens and the model {target.vocab_size:,}: take a draft "
            "model with the same vocabulary"
        )
    elif any(window is not None for window in draft.windows):
        reason = "has sliding windows, which is not offered for draft models"
    elif draft.states:
        reason = f"is {draft.architecture}: recurrent states are not offered for draft models"
    elif draft.prompt_attention == "bidirectional":
        reason = "is not offered where a prompt's tokens see all of it"
    elif draft.position_axes > 1:
        reason = "reads tokens alone: it is not offered beside media and prompt_embeds"
    elif draft.has_learned_positions and draft.max_context < (
        settings.max_model_len or target.max_context
    ):
        reason = (
            f"has {draft.max_context:,} positions: set max_model_len={draft.max_context} or less"
        )
    if reason is not None:
        raise ConfigError(f"speculative_config: the draft model {reason}.")


def _check_tokens(draft: Path, target: Path) -> None:
    """Refuse another vocabulary of the same size, where both folders have one that can be read."""
    known = [_vocabulary(folder) for folder in (draft, target)]
    if None not in known and known[0] != known[1]:
        raise ConfigError(
            "speculative_config: the draft model's tokenizer.json gives tokens other numbers than "
            "the model's: take a draft model with the same vocabulary."
        )


def _vocabulary(folder: Path) -> Any:
    """Return what is in a tokenizer's table of tokens; None without such a file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8"))["model"].get("vocab")

"""The parts of a receipt that all requests of an engine share: all that decides its bits."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

import quire
from quire.base.errors import ConfigError, RequestError
from quire.config import env
from quire.config.checkpoint import read_checkpoint
from quire.config.kv_disk.digest import digest_files, stamp_files
from quire.config.media.image_spec import ImageSpec
from quire.config.media.registry import with_tower
from quire.config.model_spec import GenerationDefaults
from quire.config.resolve import Resolved
from quire.config.settings import EngineSettings
from quire.config.startup import StartupPlan
from quire.protocol.control import Report
from quire.protocol.receipts import Witness
from quire.protocol.receipts.receipt import digest
from quire.protocol.request import EngineRequest
from quire.protocol.status import EngineFacts
from quire.text.rendering import ChatTemplate, Renderer

__all__ = ["CONDITIONAL_SETTINGS", "STATED_SETTINGS", "Provenance", "engine_facts"]

STATED_SETTINGS = (
    "activation_bits",
    "attention_backend",
    "attention_isa",
    "dtype",
    "hf_overrides",
    "kv_cache_dtype",
    "linear_isa",
    "load_format",
    "logprobs_mode",
    "model_impl",
    "quantization",
    "rank_invariant",
)
"""Settings that change bits, of tokens or of their log-probabilities."""

CONDITIONAL_SETTINGS = ("seed", "tensor_parallel_size")
"""Settings that are stated where they change bits: the seed if it makes the weights, the number of
ranks if sums depend on it."""


def engine_facts(plan: StartupPlan, report: Report, *, has_hooks: bool) -> EngineFacts:
    """Return the facts of an engine that has started. has_hooks: hooks see every output."""
    resolved, checkpoint = plan.resolved, plan.checkpoint
    chosen = resolved.settings
    program = {name: getattr(chosen, name) for name in STATED_SETTINGS}
    if not chosen.rank_invariant:
        program["tensor_parallel_size"] = chosen.tensor_parallel_size
    if checkpoint is None:
        program["seed"] = chosen.seed
    return EngineFacts(
        program={"quire": quire.__version__, "kernels": report.kernels, **program},
        config=_config_digest(resolved),
        files="" if checkpoint is None else stamp_files(checkpoint.files),
        unstable=_unstable(resolved, report, has_hooks=has_hooks),
    )


def _config_digest(resolved: Resolved) -> str:
    spec = replace(
        resolved.spec,
        generation=GenerationDefaults(),
        eos_token_ids=(),
        dtype=resolved.settings.dtype,
    )
    return digest(repr(spec).encode(), b"quire config")


def _unstable(resolved: Resolved, report: Report, *, has_hooks: bool) -> str:
    if resolved.settings.device != "cpu":
        return "a GPU computes"
    if resolved.settings.torch_compile:
        return "torch_compile makes kernels that differ between machines"
    if has_hooks:
        return "output hooks see every answer, and may change it"
    return report.unstable


class Provenance:
    """The front's part of it: digests of weights, tokenizer and chat template, made when the first
    request asks for a receipt. Safe to share between threads."""

    def __init__(
        self,
        settings: EngineSettings,
        folder: Path,
        renderer: Renderer,
        images: ImageSpec | None = None,
    ) -> None:
        """folder: local folder of the checkpoint. images: images that the model reads."""
        self._settings = settings
        self._folder = folder
        self._renderer = renderer
        self._images = images
        self._lock = threading.Lock()
        self._files: Sequence[Path] | None = None
        self._weights: tuple[str, str] | None = None  # stamp of the files, and their digest
        self._text: dict[str, Any] | None = None

    def witness(self, request: EngineRequest, facts: EngineFacts, name: str) -> Witness | None:
        """Return what makes the receipt of a request; None if it asks for none. name: name of the
        model, for people.

        The first call reads all weights, or looks up their digest in `env.cache_folder()`. Raises
        RequestError, naming the reason, if the bits of the answer cannot be promised."""
        if not request.params.deterministic:
            return None
        _check(request, facts)
        engine, model, text = self.sections(facts)

        def is_current() -> bool:
            """An answer may outlive its weights: `wake_up` reads the files again."""
            return self._has_files(facts)

        return Witness(
            request, engine=engine, model=model, text=text, name=name, is_current=is_current
        )

    def sections(
        self, facts: EngineFacts
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
        """Return what statements say of the engine, the model and its text. Errors as above."""
        with self._lock:
            weights = self._digest_weights(facts)
            if self._text is None:
                self._text = self._digest_text()
        return facts.program, {"weights": weights, "config": facts.config}, self._text

    def _digest_weights(self, facts: EngineFacts) -> str:
        """Return the digest of the files that the engine has read. Files that were written since
        are refused, though their old contents may compute: after a sleep of level 2 the engine
        reads them again."""
        if self._settings.load_format == "dummy":
            return "made up"
        try:
            if self._files is None:
                self._files = with_tower(read_checkpoint(self._folder), self._images).files
            stamp = stamp_files(self._files)
            if stamp == facts.files and (self._weights is None or self._weights[0] != stamp):
                made = digest_files(self._files, env.cache_folder() / "digests.json").hex()
                self._weights = stamp, made
                stamp = stamp_files(self._files)  # they may have been written meanwhile
        except (OSError, ConfigError) as error:
            raise _refused(f"the weight files cannot be read any more ({error})") from error
        if self._weights is None or not self._weights[0] == stamp == facts.files:
            raise _refused("the weight files were written after the engine had read them")
        return self._weights[1]

    def _has_files(self, facts: EngineFacts) -> bool:
        """Return whether the weight files still are those that the engine has read."""
        try:
            return self._files is None or stamp_files(self._files) == facts.files
        except OSError:
            return False

    def _digest_text(self) -> dict[str, Any]:
        tokenizer, template = self._renderer.tokenizer, self._renderer.chat_template
        return {
            "tokenizer": "" if tokenizer is None else tokenizer.digest(),
            "template": "" if template is None else _template_digest(template),
        }


def _template_digest(template: ChatTemplate) -> str:
    sources = {name: template.source(name) for name in template.names}
    return digest(msgspec.json.encode(sources, order="sorted"), b"quire template")


def _check(request: EngineRequest, facts: EngineFacts) -> None:
    params = request.params
    if facts.unstable:
        raise _refused(facts.unstable)
    if params.logits_processors:
        raise _refused("logits_processors are functions, which no receipt can state")
    if params.hooks:
        raise _refused("hooks may change it")
    if request.is_open:
        raise _refused("the prompt comes in pieces")


def _refused(reason: str) -> RequestError:
    return RequestError(
        f"deterministic is true, but the bits of this answer cannot be promised: {reason}. Leave "
        "deterministic out."
    )

"""Prompts with the adapters that calls name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.config.adapters import AdapterFolders
from quire.errors import ConfigError, RequestError
from quire.protocol.adapters import LoRARequest
from quire.rendering.renderer import RenderedPrompt

__all__ = ["PromptAdapters"]


class PromptAdapters:
    """Finds adapters in their folders; safe to share between threads."""

    def __init__(self, max_rank: int) -> None:
        """max_rank: of the engine."""
        self._folders = AdapterFolders(max_rank)

    def put(self, prompt: RenderedPrompt, lora: LoRARequest | None) -> RenderedPrompt:
        """Return the prompt as one that an adapter computes. RequestError if its folder has none
        that can be used."""
        if lora is None:
            return prompt
        if not isinstance(lora, LoRARequest):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"lora_request is {lora!r}: give LoRARequest(name, id, path)")
        try:
            return replace(prompt, adapter=self._folders.ref(lora.name, lora.path))
        except ConfigError as error:
            raise RequestError(f"the adapter {lora.name!r} cannot be used: {error}") from error

    def put_each(
        self,
        prompts: Sequence[RenderedPrompt | RequestError],
        adapters: Sequence[LoRARequest | None],
    ) -> list[RenderedPrompt | RequestError]:
        """Return prompts with their adapters; one that cannot be used fails its own prompt."""
        found: list[RenderedPrompt | RequestError] = []
        for prompt, lora in zip(prompts, adapters, strict=True):
            try:
                is_fine = isinstance(prompt, RenderedPrompt)
                found.append(self.put(prompt, lora) if is_fine else prompt)
            except RequestError as error:
                found.append(error)
        return found

"""Adapters as requests name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.errors import RequestError
from quire.protocol.codec import is_unicode

__all__ = ["AdapterArgument", "AdapterRef", "LoRARequest", "adapters_for"]


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that a request is computed with. digest: hash of its contents, so that a rewritten
    folder is another adapter, whatever its name."""

    name: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for the prompts of a call; the names are those of vLLM.

    lora_name: tells adapters apart in messages. lora_int_id: at least 1. lora_path: a folder of
    PEFT's. Raises RequestError for a value that names no adapter.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id is {self.lora_int_id}, but ids of adapters begin at 1. Give another."
            )
        if not self.lora_name or not self.lora_path:
            raise RequestError(
                f"the adapter {self.lora_name!r} at {self.lora_path!r} needs a name and a folder. "
                "Give both."
            )
        if not is_unicode(self.lora_name):
            raise RequestError(
                f"lora_name is {self.lora_name!r}, which has half of a surrogate pair. "
                "Give valid Unicode."
            )

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


AdapterArgument = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one per prompt."""


def adapters_for(count: int, asked: AdapterArgument) -> list[LoRARequest | None]:
    """Return one entry per prompt. RequestError for another number of them."""
    each = list(asked) if isinstance(asked, Sequence) else [asked] * count
    if len(each) != count:
        raise RequestError(
            f"lora_request has {len(each)} entries for {count} prompts: give one for all, or one "
            "per prompt"
        )
    return each

"""Sources of text: a running server, or an engine in this process."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from quire.base.errors import RequestError
from quire.entrypoints.client import RemoteServer

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM
    from quire.protocol.outputs import RequestOutput
    from quire.protocol.sampling_params import SamplingParams
    from quire.text.dialect.chat import ChatReader, WholeChats
    from quire.text.rendering import Prompt

__all__ = ["ContextFullError", "EngineSource", "Piece", "ServerSource", "TextSource"]

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """More of an answer. reasoning: more of the thinking before it. num_tokens: tokens of the
    answer so far, with its thinking; None where the source does not say. num_prompt_tokens: tokens
    of the prompt, likewise."""

    text: str
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    reasoning: str = ""


class ContextFullError(RequestError):
    """The messages leave no room for an answer."""


class TextSource(Protocol):
    """Closing an iterator before its end ends the request. sampling: parameters of the API.
    RequestError if the request is refused, ContextFullError if it is too long; EngineError if it
    breaks off."""

    @property
    def model(self) -> str:
        """The name of the model."""
        ...

    @property
    def default_sampling(self) -> Mapping[str, Any] | None:
        """Sampling values that the model's authors or its server recommend; None if unknown."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Tokens that messages and answer may have together; None where it is not said."""
        ...

    @property
    def takes_images(self) -> bool | None:
        """Return whether messages may have images; None where it is not said."""
        ...

    def chat(
        self, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> Generator[Piece]: ...

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Generator[Piece]: ...


class ServerSource:
    """card: entry of the model in `/v1/models`."""

    def __init__(self, server: RemoteServer, card: Mapping[str, Any]) -> None:
        self._server = server
        self._model = str(card["id"])
        self._card = card

    @property
    def model(self) -> str:
        return f"{self._model} at {self._server.address}"

    @property
    def default_sampling(self) -> Mapping[str, Any] | None:
        found = self._card.get("default_sampling_params")
        return found if isinstance(found, dict) else None

    @property
    def max_model_len(self) -> int | None:
        found = self._card.get("max_model_len")
        return found if isinstance(found, int) else None

    @property
    def takes_images(self) -> bool | None:
        found = self._card.get("input_modalities")
        return "image" in found if isinstance(found, list) else None

    def chat(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> Generator[Piece]:
        body = {"messages": [dict(message) for message in messages], **sampling}
        try:
            for event in self._events("/v1/chat/completions", body):
                choices = event.get("choices") or [{}]
                delta = choices[0].get("delta") or {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                yield Piece(delta.get("content") or "", *_num_tokens(event), reasoning)
        except RequestError as error:
            if _SAYS_FULL.search(str(error)):
                raise ContextFullError(str(error)) from error
            raise

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Generator[Piece]:
        for event in self._events("/v1/completions", {"prompt": prompt, **sampling}):
            choices = event.get("choices") or [{}]
            yield Piece(choices[0].get("text") or "", *_num_tokens(event))

    def _events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        asked = {"model": self._model, "stream_options": {"include_usage": True}, **body}
        with closing(self._server.stream(path, asked)) as events:
            yield from events


class EngineSource:
    """An engine in this process; starts when it is made. settings: arguments of `LLM`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from quire.entrypoints.llm import LLM

        self._llm: LLM = LLM(**settings)
        self._model = str(settings.get("model") or "the bundled model")

    @property
    def model(self) -> str:
        return f"{self._model} in this process"

    @property
    def default_sampling(self) -> Mapping[str, Any] | None:
        return self._llm.engine.default_sampling

    @property
    def max_model_len(self) -> int | None:
        return self._llm.engine.resolved.settings.max_model_len

    @property
    def takes_images(self) -> bool | None:
        return self._llm.engine.renderer.takes_images

    def chat(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> Generator[Piece]:
        chats = self._chats
        template = None if chats is None else chats.template
        renderer = self._llm.engine.renderer
        bare, images = renderer.take_images(messages)
        rendered = renderer.render_chat(bare, chat_template=template, images=images)
        longest = self._llm.engine.resolved.settings.max_model_len
        if len(rendered.token_ids) >= longest:
            raise ContextFullError(
                f"The messages have {len(rendered.token_ids)} tokens, and the context length is "
                f"{longest}. Send less, or raise --max-model-len."
            )
        # An answer is as long as the context allows, as a server has it.
        params = self._params({"max_tokens": None, **sampling})
        reader = None if chats is None else chats.reader(messages, rendered.token_ids, params)
        return self._stream(rendered, params, reader)

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Generator[Piece]:
        return self._stream(prompt, self._params(sampling))

    def shutdown(self) -> None:
        """Free the engine."""
        self._llm.shutdown()

    @cached_property
    def _chats(self) -> WholeChats | None:
        """Reader of thinking and answers; None if the model has no chats."""
        from quire.text.dialect import find_dialect
        from quire.text.dialect.chat import WholeChats

        engine = self._llm.engine
        template, tokenizer = engine.renderer.chat_template, engine.renderer.tokenizer
        if template is None or tokenizer is None:
            return None
        dialect = find_dialect(template, tokenizer)
        return WholeChats(dialect, template, tokenizer, engine.eos_token_ids, None)

    def _params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        return replace(self._llm.get_default_sampling_params(), **sampling)

    def _stream(
        self, prompt: Prompt, params: SamplingParams, reader: ChatReader | None = None
    ) -> Generator[Piece]:
        from quire.text.dialect.chat import answer_of

        # `stream` is a generator, which its callers need not know; closing it ends the request.
        outputs = cast("Generator[RequestOutput]", self._llm.stream(prompt, params))
        shown = 0
        with closing(outputs):
            for output in outputs:
                sample = output.outputs[0]
                counts = len(sample.token_ids), len(output.prompt_token_ids)
                if reader is None:
                    yield Piece(sample.text[shown:], *counts)
                    shown = len(sample.text)
                    continue
                answer = answer_of(reader.take(sample, is_last=output.finished))
                yield Piece(answer.content or "", *counts, answer.reasoning or "")


def _num_tokens(event: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the token counts of the answer and of its prompt."""
    usage = event.get("usage") or {}
    return usage.get("completion_tokens"), usage.get("prompt_tokens")


_SAYS_FULL = re.compile(r"context.{0,20}(length|window|size)", re.IGNORECASE)
"""In what servers say of a prompt that is too long; the OpenAI API has no better sign of it."""

"""One turn of a conversation that the server keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from quire.server.generation.history import continued
from quire.server.generation.service import SampleDelta
from quire.server.requests.places import Fields
from quire.server.sessions.pins import SessionPins
from quire.server.sessions.store import Session, SessionStore
from quire.text.dialect import Part, Text
from quire.text.dialect.chat import answer_of
from quire.text.rendering import RenderedPrompt, Tokenizer

__all__ = ["SessionTurn"]

_FIXED = ("system", "developer")


class SessionTurn:
    """The conversation so far, and the messages of this turn. It is stored when the answer is
    complete. If two turns of a conversation run at once, the first to end is stored."""

    def __init__(
        self,
        store: SessionStore,
        pins: SessionPins,
        session_id: str,
        *,
        tenant: str,
        weight: float,
        salt: str,
    ) -> None:
        """weight: weight of the caller's key. salt: salt of the request's cached prefixes."""
        self._store = store
        self._pins = pins
        self._tenant = tenant
        self._weight = weight
        self._session = store.find(session_id, tenant) or Session(session_id)
        self._session.salt = salt
        self._messages: list[Fields] = []
        self._prompt: RenderedPrompt | None = None
        self._parts: list[Part] = []
        self._token_ids: list[int] = []
        self._has_ended = False

    def conversation(self, given: Sequence[Fields]) -> list[Fields]:
        """Return the whole conversation. given: messages of the request. If one of them is the
        assistant's, they already are the whole conversation. Instructions at their beginning
        replace earlier ones."""
        before = self._session.messages
        self._messages = list(given)
        if before and not any(_role(each) == "assistant" for each in given):
            if given and _role(given[0]) in _FIXED:
                num_fixed = next(
                    (i for i, each in enumerate(before) if _role(each) not in _FIXED), len(before)
                )
                start = next(
                    (i for i, each in enumerate(given) if _role(each) not in _FIXED), len(given)
                )
                self._messages = [*given[:start], *before[num_fixed:], *given[start:]]
            else:
                self._messages = [*before, *given]
        return self._messages

    def continued(
        self, prompt: RenderedPrompt, tokenizer: Tokenizer | None
    ) -> tuple[RenderedPrompt, int]:
        """Return the prompt of the conversation, and how many known tokens it has. It keeps the
        tokens that the engine knows, as far as their text is unchanged; none beside images, which
        stand for tokens that only their own prompt has."""
        num_kept = 0
        if tokenizer is not None and self._session.token_ids and not prompt.parts:
            prompt, num_kept = continued(prompt, self._session.token_ids, tokenizer)
        self._prompt = prompt
        return prompt, num_kept

    @property
    def num_known(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._session.token_ids)

    def take(self, deltas: Sequence[SampleDelta]) -> None:
        """Read the growth of an answer to a request with one sample."""
        for delta in deltas:
            self._parts += [Text(delta.text)] if delta.text else delta.parts
            self._token_ids += delta.token_ids
            self._has_ended |= delta.finish_reason is not None

    def keep(self) -> None:
        """Keep the conversation, if the answer is whole and no other turn has ended meanwhile."""
        if not self._has_ended or self._prompt is None:
            return
        session = self._session
        session.messages = [*self._messages, _message(self._parts)]
        session.token_ids = [*self._prompt.token_ids, *self._token_ids]
        if self._prompt.parts:
            session.token_ids = []
        if self._store.put(session, self._tenant) and session.token_ids:
            self._pins.follow(session, self._tenant, self._weight)


def _role(message: object) -> object:
    return cast("Fields", message).get("role") if isinstance(message, dict) else None


def _message(parts: Sequence[Part]) -> Fields:
    """Return an answer in the form in which the next turn renders it."""
    answer = answer_of(parts)
    message: Fields = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in answer.tool_calls
        ]
    return message

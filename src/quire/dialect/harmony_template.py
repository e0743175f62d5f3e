"""Our own renderer in place of gpt-oss's chat template."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.dialect.harmony import render_harmony
from quire.dialect.spec import ArgumentStyle, Dialect
from quire.dialect.tools import tool_of
from quire.rendering import ChatTemplate, check_messages
from quire.rendering.messages import ContentForm, fit_messages, plain_messages

__all__ = ["HarmonyTemplate", "own_template"]

_EFFORT = "reasoning_effort"
_SWITCHES = frozenset(("enable_thinking", "thinking"))
"""Variables of other families, which have no effect on this one."""
_LIKE = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts of other models. This one always thinks."""


def own_template(
    dialect: Dialect | None, template: ChatTemplate | None
) -> ChatTemplate | HarmonyTemplate | None:
    """Return the renderer of a model's conversations: its template, or ours in its place. A
    template that the user gave is kept."""
    if template is None or template.is_given:
        return template
    if dialect is None or dialect.style is not ArgumentStyle.CHANNELS:
        return template
    return HarmonyTemplate(template)


def _content_form(_role: str, _has_calls: bool) -> ContentForm:
    return "string"


class HarmonyTemplate:
    """Writes the same as the model's template. It uses the template itself for anything outside of
    the published format: documents, a last message to continue, other variables than the effort,
    tools of other kinds."""

    def __init__(
        self, template: ChatTemplate, today: Callable[[], datetime.date] = datetime.date.today
    ) -> None:
        self._template = template
        self._today = today

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises RequestError when a request sets a variable that only the engine may set."""
        self._template.check_kwargs(kwargs)

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation. Arguments and errors as in `ChatTemplate`, and
        RequestError for an effort, a role or a result as in `render_harmony`. An effort that only
        other models know counts as the nearest."""
        found = [tool_of(given) for given in tools or ()]
        others = kwargs.keys() - _SWITCHES - {_EFFORT}
        if documents or continue_final_message or others or None in found:
            return self._template.render(
                messages, tools, documents, add_generation_prompt, continue_final_message, **kwargs
            )
        chat = plain_messages(messages)
        check_messages(chat)
        effort = kwargs.get(_EFFORT) or "medium"
        return render_harmony(
            fit_messages(chat, _content_form, "string"),
            [tool for tool in found if tool is not None],
            current_date=self._today().isoformat(),
            reasoning_effort=_LIKE.get(effort, effort) if isinstance(effort, str) else effort,
            add_generation_prompt=add_generation_prompt,
        )

"""Instructions in places of a conversation that a chat template does not show."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.text.rendering import ChatTemplate
from tests.rendering.test_chat_template import (
    AGAIN,
    ANSWER,
    ASK,
    REASONED,
    SOURCES,
    SYSTEM,
    ours,
    outcome,
)

DEVELOPER = {"role": "developer", "content": "Speak as a pirate."}
PLACES_OF_RULES: dict[str, list[dict[str, Any]]] = {
    "developer": [DEVELOPER, ASK],
    "two": [SYSTEM, DEVELOPER, ASK],
    "later": [ASK, ANSWER, {**DEVELOPER, "role": "system"}, AGAIN],
    "later_developer": [SYSTEM, ASK, ANSWER, DEVELOPER, AGAIN],
    "last": [ASK, DEVELOPER],
    "parts": [{**DEVELOPER, "content": [{"type": "text", "text": DEVELOPER["content"]}]}, ASK],
}


@pytest.mark.parametrize("name", SOURCES)
def test_no_instruction_vanishes(name: str) -> None:
    """Fault: an agent's instructions reach no model whose template knows no developer, or reads one
    system message, at the beginning."""
    template = ours(name)
    for label, chat in PLACES_OF_RULES.items():
        text = outcome(template.render, chat)
        assert text is not None or name == "gemma", label  # it has no place for them, and says so
        if text is not None:
            assert text.count("Speak as a pirate.") == 1, label
            assert text.count("Be kind.") == (SYSTEM in chat), label


def test_where_instructions_go() -> None:
    """Fault: they are the assistant's words, or the order of the rules changes."""

    def system(text: str) -> dict[str, Any]:
        return {"role": "system", "content": text}

    pirate = DEVELOPER["content"]
    both = system(f"Be kind.\n\n\n{pirate}")
    for name in ("zephyr", "command_r", "deepseek", "llama2", "mistral_v3"):
        assert ours(name).render([DEVELOPER, ASK]) == ours(name).render([system(pirate), ASK])
    for name in ("llama2", "vicuna"):
        expected = ours(name).render([both, ASK, ANSWER, AGAIN])
        assert ours(name).render([SYSTEM, DEVELOPER, ASK, ANSWER, AGAIN]) == expected
        asked = {**AGAIN, "content": f"{pirate}\n\n{AGAIN['content']}"}
        expected = ours(name).render([SYSTEM, ASK, ANSWER, asked])
        assert ours(name).render([SYSTEM, ASK, ANSWER, DEVELOPER, AGAIN]) == expected
    two_roles = "{% for m in messages %}{{ 'U:' if m.role == 'user' else 'A:' }}{{ m.content }}"
    two_roles = ChatTemplate(two_roles + "{% endfor %}")
    assert two_roles.render([DEVELOPER, AGAIN]) == f"U:{pirate}\n\nAnd now?"
    only_user = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}"
    only_user += "{% endif %}{% endfor %}"
    template = ChatTemplate(only_user)
    for chat, text in (
        ([system("a"), ASK], f"<user>a\n\n{ASK['content']}"),
        ([AGAIN, system("a")], "<user>And now?\n\na"),
        ([AGAIN, REASONED, system("a")], "<user>And now?<assistant>42<user>a"),
        ([AGAIN, REASONED, system("a"), AGAIN], "<user>And now?<assistant>42<user>a\n\nAnd now?"),
        ([AGAIN, AGAIN], "<user>And now?<user>And now?"),
    ):
        assert template.render(chat) == text
    shown = f"<|im_start|>developer\n{pirate}<|im_end|>"
    assert shown in ours("chatml").render([ASK, DEVELOPER])
    with pytest.raises(RequestError, match="nothing to continue"):
        template.render([ASK, system("a")], None, None, False, True)

"""Habits of chat templates that cost cached prefixes, planted one by one and found in real ones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from quire.text.rendering.chat_template.cache_lint import cache_risks
from quire.text.rendering.chat_template.template import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"
TOOLS = "{% if tools %}<|tools|>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
LOOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def risks(source: str) -> list[str]:
    def make(now: Callable[[], datetime]) -> ChatTemplate:
        return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, now=now)

    return [risk.name for risk in cache_risks(make)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LOOP + ANSWER, []),
        ("{{ strftime_now('%d %b %Y') }}" + LOOP + ANSWER, ["date"]),
        ("{{ strftime_now('%Y') }}" + LOOP + ANSWER, ["date"]),
        (LOOP + "{% if add_generation_prompt %}<|bot|>{% endif %}", ["generation_prompt"]),
        (
            "{% for m in messages %}{% if not loop.last %}<|old|>{% endif %}<|{{ m.role }}|>"
            "{{ m.content }}<|end|>{% endfor %}" + ANSWER,
            ["generation_prompt", "history"],
        ),
        (
            "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.last %}"
            "{{ m.reasoning_content }}{% endif %}{{ m.content }}<|end|>{% endfor %}" + ANSWER,
            ["thinking"],
        ),
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>"
            "{% endfor %}" + ANSWER,
            ["thinking"],
        ),
        (TOOLS + LOOP + ANSWER, ["tool_order"]),
        (
            "{% for m in messages %}{% if loop.revindex <= 1 %}" + TOOLS + "{% endif %}"
            "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + ANSWER,
            ["tools", "tool_order"],
        ),
        (
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
            "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>"
            "{% endfor %}" + ANSWER,
            ["system"],
        ),
    ],
)
def test_planted(source: str, expected: list[str]) -> None:
    """Fault: a habit is not seen, or one is seen that is not there."""
    assert risks(source) == expected


def test_how_often_the_date_changes_is_told() -> None:
    source = "{{ strftime_now('%d %b %H:%M') }}" + LOOP + ANSWER
    (risk,) = cache_risks(lambda now: ChatTemplate(source, {}, now=now))
    assert "changes with every minute" in risk.words


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", []),
        ("llama3", []),
        ("gemma", []),
        ("qwen3", ["thinking"]),
        ("deepseek", ["thinking", "system"]),
        ("llama31_tools", ["date", "tool_order"]),
        ("mistral_v3", ["tools", "system", "tool_order"]),
        ("qwen25", ["tool_order"]),
    ],
)
def test_known_templates(name: str, expected: list[str]) -> None:
    assert risks((TEMPLATES / f"{name}.jinja").read_text()) == expected


def test_tools_that_end_earlier_in_another_order() -> None:
    """Fault: a server does not start, since one prompt is the beginning of the other."""
    source = ANSWER + "{% if tools and tools[0].function.name == 'quire_two' %}x{% endif %}"
    assert "tool_order" not in risks(source)


def test_a_template_that_refuses_all_has_no_risk() -> None:
    assert risks("{{ raise_exception('no') }}") == []

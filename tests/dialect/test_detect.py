"""Detection of a model's dialect from its template and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.bundled import bundled_model_path
from quire.text.dialect import Dialect, Thinking, answer_grammar, find_dialect, tools_prompt
from quire.text.dialect.families import DIALECTS, VARIANTS
from quire.text.rendering import Tokenizer
from quire.text.rendering.chat_template.template import ChatTemplate
from tests.dialect.answers import TOOLS, parsed, read
from tests.dialect.chat_templates import TEMPLATES, WITHOUT_CALLS, chatml
from tests.dialect.models import Follower, tokenizer

MARKERS = tuple(
    dict.fromkeys(
        marker
        for name in DIALECTS
        for each in VARIANTS.get(name, (DIALECTS[name],))
        for marker in (*each.markers, *(each.thinking or ()), *each.stops)
    )
)
KINDS = {"special": tokenizer(MARKERS), "added": tokenizer((), MARKERS), "text": tokenizer()}
CALLS = (
    ("files.write", {"path": "a b", "text": 'say "x"\nand more'}),
    ("get_weather", {"city": "Oslo", "days": 2, "exact": True}),
)


def conversation(num_calls: int, dialect: Dialect) -> list[dict[str, object]]:
    calls = [
        {
            "id": f"functions.{name}:{i}" if dialect.name == "kimi_k2" else f"abcdefgh{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(CALLS[:num_calls])
    ]
    return [
        {"role": "user", "content": "What <tool_call> now?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_template_tells(form: str, kind: str) -> None:
    """And what it renders of another conversation passes the grammar and the parser."""
    name, source = TEMPLATES[form]
    template, tokens = ChatTemplate(source), KINDS[kind]
    dialect = find_dialect(template, tokens)
    assert dialect.name == name
    assert dialect.is_single == (name == "llama3_json")
    assert (dialect.thinking == ("<think>", "</think>")) == ("</think>" in source)
    messages = conversation(1 if name == "llama3_json" else 2, dialect)
    prompt = template.render(messages[:1])
    whole = template.render(messages, add_generation_prompt=False)
    answer = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    assert answer != whole
    ids = tokens.encode(answer, add_special_tokens=False)
    found = read(parsed(dialect, tokens, ids)[0])
    assert found.calls == CALLS[: len(found.calls)]
    assert found.text == ""
    spec = answer_grammar(dialect, TOOLS)
    assert spec is not None
    assert Follower(spec, tokens).accepts(ids), answer
    assert find_dialect(template, tokens, name) == dialect


EACH_CALL = "{%- for c in m.tool_calls or [] %}{% set f = c.function %}"
_ARGUMENTS = "{{ f.arguments | tojson }}"
UNKNOWN = {
    "tagged": f"{EACH_CALL}<<do>>{{{{ f.name }}}} with {_ARGUMENTS}<<done>>\n{{% endfor %}}",
    "listed": (
        "{%- if m.tool_calls %}[ACTIONS]"
        + EACH_CALL
        + "{{ ', ' if not loop.first }}"
        + '{"tool": "{{ f.name }}", "input": '
        + _ARGUMENTS
        + "}{% endfor %}[/ACTIONS]{% endif %}"
    ),
    "bare": EACH_CALL + 'run({"fn": "{{ f.name }}", "with": ' + _ARGUMENTS + "})\n{% endfor %}",
    "token": EACH_CALL + "<|act|>{{ f.name }}<|in|>" + _ARGUMENTS + "{% endfor %}",
}
"""Forms that no dialect has, for the calls of a turn."""


@pytest.mark.parametrize("form", UNKNOWN)
def test_a_form_that_nobody_knows_is_derived_from_the_template(form: str) -> None:
    """Turns red when calls in it are not read, or their grammar allows something else."""
    template, tokens = ChatTemplate(chatml(UNKNOWN[form])), tokenizer(("<|act|>", "<|in|>"))
    dialect = find_dialect(template, tokens)
    assert (dialect.name, dialect.describes_tools) == ("derived", False)
    assert dialect.is_bare == (form == "bare")
    messages = conversation(2, dialect)
    prompt = template.render(messages[:1])
    whole = template.render(messages, add_generation_prompt=False)
    answer = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    assert answer != whole
    ids = tokens.encode(answer, add_special_tokens=False)
    found = read(parsed(dialect, tokens, ids)[0])
    assert found.calls == CALLS
    assert found.text.strip() == ""
    spec = answer_grammar(dialect, TOOLS)
    assert spec is not None
    assert Follower(spec, tokens).accepts(ids), answer
    said = tokens.encode("Nothing to do.", add_special_tokens=False)
    assert read(parsed(dialect, tokens, said)[0]).text == "Nothing to do."


@pytest.mark.parametrize(
    "source", [WITHOUT_CALLS, "{{ messages[0].content }}", "{{ nothing.x.y }}"]
)
def test_a_template_without_calls_has_the_generic_one(source: str) -> None:
    template = ChatTemplate(source, keep_broken=True)
    dialect = find_dialect(template, KINDS["special"])
    assert dialect.name == "generic"
    assert dialect.describes_tools
    assert "get_weather" in tools_prompt(TOOLS)
    assert "response" not in tools_prompt(TOOLS, "required")
    assert tools_prompt(TOOLS, "none") == ""


def test_no_template_and_a_broken_one() -> None:
    assert find_dialect(None, KINDS["special"]).name == "generic"
    broken = ChatTemplate("{% if %}", keep_broken=True)
    assert find_dialect(broken, KINDS["special"]).name == "generic"
    assert find_dialect(None, KINDS["special"], "hermes").thinking == ("<think>", "</think>")
    assert find_dialect(None, KINDS["text"], "hermes").thinking is None
    only = tokenizer(("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
    assert find_dialect(None, only, "mistral").id_open == "[CALL_ID]"


def test_a_name_forces_one_and_an_unknown_one_lists_all() -> None:
    template = ChatTemplate(TEMPLATES["hermes"][1])
    assert find_dialect(template, KINDS["text"], "llama3_json").name == "llama3_json"
    with pytest.raises(ConfigError, match=r"'hermess'.*deepseek_v3.*hermes.*kimi_k2"):
        find_dialect(template, KINDS["text"], "hermess")


def test_the_bundled_model() -> None:
    folder = Path(bundled_model_path())
    tokens = Tokenizer.from_folder(folder)
    dialect = find_dialect(ChatTemplate.from_folder(folder, tokens.special_tokens), tokens)
    assert dialect.name == "quire"
    assert dialect.thinking is None
    assert dialect.tokens.special == {"<|tool_call|>"}


def test_thinking_of_a_model_without_calls() -> None:
    source = (
        "{{ messages[0].content }}{% if add_generation_prompt %}[THINK]{# [/THINK] #}{% endif %}"
    )
    dialect = find_dialect(ChatTemplate(source), tokenizer(("[THINK]", "[/THINK]")))
    assert dialect.thinking == ("[THINK]", "[/THINK]")
    parts, _ = parsed(
        dialect,
        tokenizer(("[THINK]", "[/THINK]")),
        tokenizer(("[THINK]", "[/THINK]")).encode("so[/THINK]yes", add_special_tokens=False),
        tools=(),
        thinking=Thinking.OPEN,
    )
    assert (read(parts).reasoning, read(parts).text) == ("so", "yes")

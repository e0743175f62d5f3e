"""The channels of gpt-oss: prompts as the published description writes them, and answers read."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from quire.base.errors import ConfigError, RequestError
from quire.config.settings import EngineSettings
from quire.engine.model_front import ModelFront
from quire.engine.provenance import Provenance
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.outputs import CompletionOutput
from quire.protocol.sampling_params import SamplingParams
from quire.server.anthropic.request import read_request
from quire.server.generation.backend import ServedModel
from quire.server.generation.prompts import PromptRenderer
from quire.server.openai.tools import answer_form, asked_tools
from quire.server.requests.bodies import ChatRequest
from quire.server.requests.limits import Limits
from quire.server.requests.messages_bodies import MessagesRequest
from quire.text.dialect import (
    Thinking,
    Tool,
    ToolChoice,
    answer_grammar,
    find_dialect,
    thinking_at_end,
)
from quire.text.dialect.chat import WholeChats, answer_of
from quire.text.dialect.families import DIALECTS
from quire.text.dialect.harmony import HarmonyTemplate, own_template, render_harmony
from quire.text.dialect.parts import Part
from quire.text.rendering import Renderer
from quire.text.rendering.chat_template.template import ChatTemplate
from tests.dialect.answers import TOOLS, Answer, parsed, read
from tests.dialect.models import Follower, tokenizer, walk
from tests.dialect.written import encoded
from tests.profiles import examples

FAMILY = DIALECTS["openai"]
TOKENS = tokenizer((*FAMILY.markers, *FAMILY.stops))
HARMONY = FAMILY.bound(TOKENS)
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"

WEATHER = (
    Tool("get_location", description="Gets the location of the user."),
    Tool(
        "get_current_weather",
        {
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The city and state, e.g. San Francisco, CA",
                },
                "format": {"enum": ["celsius", "fahrenheit"], "default": "celsius"},
            },
            "required": ["location"],
        },
        description="Gets the current weather in the provided location.",
    ),
    Tool(
        "get_multiple_weathers",
        {
            "type": "object",
            "properties": {
                "locations": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": 'List of city and state, e.g. ["San Francisco, CA"]',
                },
                "limits": {"type": "array", "items": {"type": ["integer", "null"]}},
                "where": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}, "flags": {}},
                    "required": ["lat"],
                },
            },
            "required": ["locations"],
        },
    ),
)
SYSTEM = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-06-28

Reasoning: high

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
GOLDEN = (
    SYSTEM
    + """
Calls to these tools must go to the commentary channel: 'functions'.<|end|>\
<|start|>developer<|message|># Instructions

Use a friendly tone.

# Tools

## functions

namespace functions {

// Gets the location of the user.
type get_location = () => any;

// Gets the current weather in the provided location.
type get_current_weather = (_: {
// The city and state, e.g. San Francisco, CA
location: string,
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

type get_multiple_weathers = (_: {
// List of city and state, e.g. ["San Francisco, CA"]
locations: string[],
limits?: (number | null)[],
where?: {
lat: number,
flags?: any,
},
}) => any;

} // namespace functions<|end|><|start|>user<|message|>What is the weather like in SF?<|end|>\
<|start|>assistant"""
)
LOOP = (
    '<|channel|>analysis<|message|>Need to use it.<|end|><|start|>assistant<|channel|>commentary '
    'to=functions.get_current_weather <|constrain|>json<|message|>{"location":"SF"}<|call|>'
    "<|start|>functions.get_current_weather to=assistant<|channel|>commentary<|message|>"
    '{"sunny": true}<|end|><|start|>assistant'
)  # fmt: skip


def conversation() -> list[dict[str, object]]:
    function = {"name": "get_current_weather", "arguments": '{"location":"SF"}'}
    return [
        {"role": "system", "content": "Use a friendly tone."},
        {"role": "user", "content": "What is the weather like in SF?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Need to use it.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"sunny": true}'},
    ]


def render(messages: list[dict[str, object]], tools: tuple[Tool, ...] = WEATHER) -> str:
    return render_harmony(messages, tools, current_date="2025-06-28", reasoning_effort="high")


def test_a_prompt_is_as_described() -> None:
    assert render(conversation()[:2]) == GOLDEN
    assert render(conversation()) == GOLDEN + LOOP
    plain = render([{"role": "user", "content": "What is 2 + 2?"}], ())
    assert plain == (
        f"{SYSTEM}<|end|><|start|>user<|message|>What is 2 + 2?<|end|><|start|>assistant"
    )


def test_analysis_of_a_finished_turn_is_left_out() -> None:
    messages = [
        *conversation(),
        {"role": "assistant", "content": "Sunny.", "reasoning": "It said so."},
        {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
    ]
    text = render(messages)
    assert "analysis<|message|>" not in text
    assert text.endswith(
        "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|>"
        "<|start|>user<|message|>Thanks<|end|><|start|>assistant"
    )
    assert "<|return|>" not in text


def as_sent(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def test_a_server_renders_what_is_described_and_leaves_the_rest_to_the_template() -> None:
    """Catches a gpt-oss model whose prompts depend on what its folder's template does."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}", {})
    ours = own_template(HARMONY, template)
    assert isinstance(ours, HarmonyTemplate)
    assert own_template(DIALECTS["hermes"], template) is template
    assert own_template(HARMONY, None) is None
    given = ChatTemplate("{{ messages[0].content }}", {}, is_given=True)
    assert own_template(HARMONY, given) is given, "the operator's template wins"
    ours = HarmonyTemplate(template, lambda: datetime.date(2025, 6, 28))
    tools = [as_sent(tool) for tool in WEATHER]
    assert ours.render(conversation()[:2], tools, reasoning_effort="high", thinking=True) == GOLDEN
    assert "Reasoning: medium" in ours.render(conversation()[:2])
    hello = [{"role": "user", "content": "Hello"}]
    assert ours.render(hello, x="!") == "Hello!"
    assert ours.render(hello, [{"type": "web_search"}]) == "Hello"
    renderer = Renderer(TOKENS, template)
    body = ChatRequest(messages=hello, tools=tools, reasoning_effort="high")
    prompts = PromptRenderer(Limits(), 1)
    rendered = asyncio.run(prompts.render_chat(renderer, body, 10_000, HARMONY, tenant=""))
    prompts.close()
    assert rendered.text is not None
    assert "Reasoning: high" in rendered.text
    assert "type get_location = () => any;" in rendered.text
    assert rendered.token_ids[0] == HARMONY.tokens.ids["<|start|>"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"role": "user", "content": ["one", {"type": "input_text", "text": "two"}]}, "one\ntwo"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, ">No.<"),
        (
            {"role": "assistant", "thinking": "So.", "tool_calls": [{"name": "now"}]},
            "analysis<|message|>So.<|end|>",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "now", "arguments": {"a": 1}}]},
            'functions.now <|constrain|>json<|message|>{"a": 1}<|call|>',
        ),
    ],
    ids=str,
)  # fmt: skip
def test_messages_of_every_form_are_rendered(given: dict[str, Any], shown: str) -> None:
    """Catches what `check_messages` allows and no other template loses."""
    ours = HarmonyTemplate(ChatTemplate("", {}))
    assert shown in ours.render([{"role": "user", "content": "x"}, given])
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls\[0\]"):
        ours.render([{"role": "assistant", "tool_calls": ["oops"]}])


def test_efforts_of_other_models() -> None:
    ours, hello = HarmonyTemplate(ChatTemplate("", {})), [{"role": "user", "content": "x"}]
    for effort, near in (("none", "low"), ("minimal", "low"), ("xhigh", "high"), (None, "medium")):
        assert f"Reasoning: {near}\n" in ours.render(hello, reasoning_effort=effort)
    with pytest.raises(RequestError, match="low, medium, high"):
        ours.render(hello, reasoning_effort=["low"])


def test_what_cannot_be_rendered() -> None:
    with pytest.raises(RequestError, match="'extreme'"):
        render_harmony([], current_date="2025-06-28", reasoning_effort="extreme")
    with pytest.raises(RequestError, match="tool_call_id"):
        render([{"role": "tool", "content": "x", "tool_call_id": "other"}])
    with pytest.raises(RequestError, match="'critic'"):
        render([{"role": "critic", "content": "x"}])


ANSWERS = [
    ("<|channel|>final<|message|>4.<|return|>", Answer("4.")),
    (
        f"<|channel|>analysis<|message|>Simple.{NEXT}<|channel|>final<|message|>4.<|return|>",
        Answer("4.", "Simple."),
    ),
    (CALL, Answer(calls=(("now", {}),))),
    (
        f"<|channel|>analysis<|message|>A{NEXT}<|channel|>analysis<|message|>B{NEXT}"
        f"<|channel|>commentary<|message|>**Plan**{NEXT}"
        "<|channel|>commentary to=functions.files.write <|constrain|>json<|message|>"
        '{"path": "\ue000<|call|>\ue001", "text": "é\u2028"}<|call|>',
        Answer("**Plan**", "A\nB", (("files.write", {"path": "<|call|>", "text": "é\u2028"}),)),
    ),
    (
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        Answer(calls=(("now", {}),)),
    ),
]
UNGUARDED = [
    (" to=functions.now<|channel|>commentary<|message|><|call|>", Answer(calls=(("now", {}),))),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", Answer("{}")),
    ("<|message|>no header", Answer("no header")),
    ("<|channel|>final <|constrain|>json<|message|>[1]", Answer("[1]")),
    ("<|channel|>analysis<|message|>cut", Answer("", "cut")),
    ("<|channel|>fin", Answer()),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), [*ANSWERS, *UNGUARDED])
@examples(15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_messages_are_read_however_they_are_cut(
    text: str, answer: Answer, data: st.DataObject
) -> None:
    ids = encoded(TOKENS, text)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    parts, parser = parsed(HARMONY, TOKENS, ids, cuts)
    assert read(parts).without_ids == answer
    assert parser.num_reasoning_tokens == len(encoded(TOKENS, answer.reasoning.replace("\n", "")))


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("{}", Answer(calls=(("now", {}),))),
        ('"{\\"a\\": 1}"', Answer(calls=(("now", {"a": 1}),))),
        ('{"a": }', Answer('{"a": }')),
        ('{"a": 1', Answer('{"a": 1')),
    ],
)
def test_a_call_that_no_grammar_holds(body: str, answer: Answer) -> None:
    """Catches a call with arguments that are none."""
    is_cut = body.count("{") > body.count("}")
    ids = encoded(TOKENS, CALL.replace("{}", body).removesuffix("<|call|>" if is_cut else ""))
    for cuts in ((), range(len(ids))):
        assert read(parsed(HARMONY, TOKENS, ids, cuts, is_held=False)[0]).without_ids == answer


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_the_grammar_takes_them(text: str, answer: Answer) -> None:
    """Without the stop token, which ends the answer."""
    ids = encoded(TOKENS, text)[: -1 if text.endswith("|>") else None]
    free, required = (answer_grammar(HARMONY, TOOLS, choice) for choice in ("auto", "required"))
    assert free is not None and required is not None
    assert Follower(free, TOKENS).accepts(ids)
    assert Follower(required, TOKENS).accepts(ids) == bool(answer.calls)
    none = answer_grammar(HARMONY, TOOLS, "none")
    assert none is not None
    assert Follower(none, TOKENS).accepts(ids) != bool(answer.calls)


def test_random_models_call() -> None:
    spec = answer_grammar(HARMONY, TOOLS, "required", thinking_budget=4)
    assert spec is not None
    schemas = {tool.name: dict(tool.schema) for tool in TOOLS}
    num_ended = 0
    for seed in range(12):
        ids = walk(spec, TOKENS, seed, phrases=[NEXT])
        if ids is None:
            continue
        num_ended += 1
        parts, parser = parsed(HARMONY, TOKENS, ids)
        ((name, arguments),) = read(parts).calls
        jsonschema.validate(arguments, schemas[name])
        assert parser.num_reasoning_tokens <= 4
    assert num_ended >= 6


def test_a_response_format_and_an_open_analysis() -> None:
    response = GrammarSpec(GrammarKind.JSON, '{"const": 1}')
    spec = answer_grammar(HARMONY, (), thinking=Thinking.OPEN, response=response)
    assert spec is not None
    ids = encoded(TOKENS, f"so{NEXT}<|channel|>final <|constrain|>json<|message|>1")
    assert Follower(spec, TOKENS).accepts(ids)
    found = read(parsed(HARMONY, TOKENS, ids, thinking=Thinking.OPEN)[0])
    assert found == Answer("1", "so")
    assert answer_grammar(HARMONY, ()) is None
    preamble = f"<|channel|>commentary<|message|>As JSON:{NEXT}"
    ids = encoded(TOKENS, f"so{NEXT}{preamble}<|channel|>final<|message|>1")
    assert not Follower(spec, TOKENS).accepts(ids), "all text is in the format"


PROMPT = "<|start|>user<|message|>x<|end|><|start|>assistant"
BEGUN = [
    ("<|channel|>final<|message|>The answer is", Thinking.CLOSED, " 4."),
    ("<|channel|>final <|constrain|>json<|message|>", Thinking.CLOSED, " 4."),
    ("<|channel|>commentary<|message|>Let me", Thinking.CLOSED, f" see.{NEXT}{CALL}"),
    ("<|channel|>analysis<|message|>We", Thinking.OPEN, f" see.{NEXT}{CALL}"),
]


@pytest.mark.parametrize(("begun", "state", "rest"), BEGUN)
def test_an_answer_that_the_prompt_began(begun: str, state: Thinking, rest: str) -> None:
    """Catches a continued message that is lost, since its header is in the prompt."""
    assert thinking_at_end(HARMONY, encoded(TOKENS, PROMPT + begun), TOKENS) is state
    assert thinking_at_end(HARMONY, encoded(TOKENS, PROMPT), TOKENS) is Thinking.NONE
    ids = encoded(TOKENS, rest)
    answer = read(parsed(HARMONY, TOKENS, ids, range(len(ids)), thinking=state)[0])
    has_call = rest.endswith(CALL)
    said = rest.partition("<|end|>")[0]
    texts = ("", said) if state is Thinking.OPEN else (said, "")
    assert answer.without_ids == Answer(*texts, (("now", {}),) if has_call else ())
    ids = encoded(TOKENS, rest.removesuffix("<|call|>"))
    choices: list[ToolChoice] = ["auto", "required", "none"]
    for choice, is_taken in zip(choices, (True, has_call, not has_call), strict=True):
        spec = answer_grammar(HARMONY, TOOLS, choice, thinking=state)
        assert spec is not None
        assert Follower(spec, TOKENS).accepts(ids) == is_taken, choice


def test_a_format_of_a_continued_answer() -> None:
    response = GrammarSpec(GrammarKind.JSON, '{"const": 1}')
    for tools in ((), TOOLS):
        spec = answer_grammar(HARMONY, tools, thinking=Thinking.CLOSED, response=response)
        assert spec is not None
        assert Follower(spec, TOKENS).accepts(encoded(TOKENS, "1"))
        assert not Follower(spec, TOKENS).accepts(encoded(TOKENS, "one"))
    assert answer_grammar(HARMONY, (), thinking=Thinking.CLOSED, thinking_budget=3) is None


def test_a_plain_chat_is_read() -> None:
    """Catches channels that become content where a request has no tools."""
    source = Path(__file__).parents[1] / "rendering" / "templates" / "gpt_oss.jinja"
    template = ChatTemplate(source.read_text())
    renderer = Renderer(TOKENS, template)
    provenance = Provenance(EngineSettings(), Path(), renderer)
    front = ModelFront(renderer, frozenset(), {}, provenance)
    body = ChatRequest(messages=[{"role": "user", "content": "x"}], thinking_token_budget=5)
    model = ServedModel(("m",), "m", 0, front, dialect=find_dialect(template, TOKENS))
    form = answer_form(asked_tools(body), body, model)
    assert form is not None
    assert (form.thinking_budget, form.tools) == (5, ())
    ids = encoded(TOKENS, ANSWERS[1][0])
    ends = {HARMONY.tokens.ids["<|return|>"]}
    chats = WholeChats(HARMONY, template, TOKENS, ends, None)
    completion = CompletionOutput(0, "", ids, finish_reason="stop", stop_reason=None)
    found = chats.answer(body.messages, encoded(TOKENS, PROMPT), completion, SamplingParams())
    assert (found.content, found.reasoning) == ("4.", "Simple.")
    reader = chats.reader(body.messages, encoded(TOKENS, PROMPT), SamplingParams())
    assert reader is not None
    growing = CompletionOutput(0)
    parts: list[Part] = []
    for token_id in ids:
        growing.token_ids.append(token_id)
        parts += reader.take(growing, is_last=False)
    parts += reader.take(completion, is_last=True)
    assert answer_of(parts) == found
    message = {"model": "m", "max_tokens": 9, "messages": body.messages}
    asked = MessagesRequest(**message, thinking={"type": "enabled", "budget_tokens": 1024})
    assert read_request(asked, model).chat.thinking_token_budget == 1024


def test_it_is_found() -> None:
    source = Path(__file__).parents[1] / "rendering" / "templates" / "gpt_oss.jinja"
    template = ChatTemplate(source.read_text())
    assert find_dialect(template, TOKENS).name == "openai"
    assert find_dialect(template, tokenizer()).name == "generic"
    assert find_dialect(None, TOKENS, "gpt-oss").stop_token_ids == HARMONY.stop_token_ids
    with pytest.raises(ConfigError, match="constrain"):
        find_dialect(template, tokenizer(), "openai")

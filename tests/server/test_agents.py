"""Needs of coding agents, on all APIs: a long conversation with tools finds its tokens in the cache
again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoTokenizer

from quire.engine.model_front import ModelFront
from tests.server.in_memory import InMemoryClient
from tests.server.running import MODEL, RunningServer, running_server
from tests.server.scripted import Script, hermes_front
from tests.waiting import WAIT_S

NUM_TURNS = 20
SYSTEM = "You are an agent that edits the files of a project. Work in small steps. " * 16
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
    "required": ["path", "line"],
}
END = "<|end|>"
LEAST_HITS = 0.95


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hermes")


@pytest.fixture(scope="module")
def front(folder: Path) -> ModelFront:
    return hermes_front(folder)


@pytest.fixture(scope="module")
def server(front: ModelFront) -> Iterator[RunningServer]:
    client = InMemoryClient(num_blocks=2048, max_model_len=16_384)
    with running_server(front, client=client) as found:
        yield found


@dataclass
class Replay:
    """A conversation as it was: the prompt of each request, and the answers of the model. messages:
    all messages, in the form of chats, kept by the test itself."""

    server: RunningServer
    script: Script
    messages: list[dict[str, Any]] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    num_unchanged: int = 0

    def answer_of(self, turn: int) -> str:
        """Return the text that the model is told to write."""
        if turn % 4 == 3:
            return f"Step {turn} is done: the file has {turn} lines now." + END
        call = {"name": "read", "arguments": {"path": f"src/file_{turn}.py", "line": turn}}
        thought = "" if turn % 2 else f"<think>\nI read file {turn}.\n</think>\n\n"
        return f"{thought}<tool_call>\n{json.dumps(call)}\n</tool_call>{END}"

    def check(self, tokenizer: Any, tools: list[Any], num_cached: int, written: str) -> None:
        """Compare the last prompt with the template's own rendering, and its hits with the tokens
        that it has in common with what the engine knew."""
        prompt = self.server.client.added[-1].prompt_token_ids.tolist()
        rendered = tokenizer.apply_chat_template(
            self.messages, tools=tools, tokenize=False, add_generation_prompt=True,
            enable_thinking=True,
        )  # fmt: skip
        decoded = tokenizer.decode(
            prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert decoded == rendered
        pairs = zip(self.known, prompt, strict=False)
        self.num_unchanged = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.known), len(prompt))
        )
        assert num_cached >= LEAST_HITS * min(self.num_unchanged, len(prompt) - 1)
        self.known = [*prompt, *self.script.ids(written)]


@pytest.fixture
def replay(server: RunningServer, front: ModelFront) -> Iterator[Replay]:
    with Script(server, front) as script:
        yield Replay(server, script, [{"role": "system", "content": SYSTEM}])


def say(replay: Replay, turn: int) -> str:
    text = f"Go on with step {turn}, please."
    replay.messages.append({"role": "user", "content": text})
    return text


def answer(replay: Replay, content: str, thought: str, call: dict[str, Any] | None) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if thought:
        message["reasoning_content"] = thought
    if call is not None:
        message["tool_calls"] = [{"type": "function", "function": call}]
    replay.messages.append(message)
    if call is not None:
        replay.messages.append({"role": "tool", "content": result_of(call)})


def result_of(call: dict[str, Any]) -> str:
    return f"{call['arguments']['path']}: def f(): return {call['arguments']['line']}"


@pytest.fixture(scope="module")
def tokenizer(folder: Path, front: ModelFront) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_a_long_conversation_of_messages(replay: Replay, tokenizer: Any) -> None:
    tools: Any = [{"name": "read", "description": "Read.", "input_schema": SCHEMA}]
    function = {"name": "read", "description": "Read.", "parameters": SCHEMA}
    turns: list[Any] = [{"role": "user", "content": say(replay, 0)}]
    with anthropic.Anthropic(
        base_url=replay.server.url, api_key="none", timeout=WAIT_S, max_retries=0
    ) as client:
        for turn in range(NUM_TURNS):
            written = replay.answer_of(turn)
            with client.messages.stream(
                model=MODEL, messages=turns, system=SYSTEM, tools=tools, max_tokens=200,
                thinking={"type": "adaptive"}, extra_body={"seed": replay.script.tell(written)},
            ) as stream:  # fmt: skip
                found = stream.get_final_message()
            cached = found.usage.cache_read_input_tokens or 0
            replay.check(tokenizer, [{"type": "function", "function": function}], cached, written)
            blocks = {block.type: block for block in found.content}
            turns.append({"role": "assistant", "content": found.content})
            used: Any = blocks.get("tool_use")
            call = used and {"name": used.name, "arguments": used.input}
            text: Any = blocks.get("text")
            thought: Any = blocks.get("thinking")
            answer(replay, text.text if text else "", thought.thinking if thought else "", call)
            if call:
                result = {"type": "tool_result", "tool_use_id": used.id}
                content: list[Any] = [{**result, "content": result_of(call)}]
            else:
                content = [{"type": "text", "text": say(replay, turn + 1)}]
            turns.append({"role": "user", "content": content})
    assert replay.num_unchanged > 0.9 * len(replay.server.client.added[-1].prompt_token_ids)


def test_a_long_conversation_of_responses(replay: Replay, tokenizer: Any) -> None:
    function = {"name": "read", "description": "Read.", "parameters": SCHEMA}
    tools: Any = [{"type": "function", **function, "strict": False}]
    shown = {"type": "function", "function": {**function, "strict": False}}
    given: Any = [{"role": "user", "content": say(replay, 0)}]
    previous: str | None = None
    with openai.OpenAI(
        base_url=f"{replay.server.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0
    ) as client:
        for turn in range(NUM_TURNS):
            written = replay.answer_of(turn)
            with client.responses.stream(
                model=MODEL, input=given, instructions=SYSTEM, tools=tools, max_output_tokens=200,
                previous_response_id=previous or openai.omit,
                extra_body={
                    "seed": replay.script.tell(written),
                    "chat_template_kwargs": {"enable_thinking": True},
                },
            ) as stream:  # fmt: skip
                found = stream.get_final_response()
            assert found.usage is not None
            cached = found.usage.input_tokens_details.cached_tokens
            replay.check(tokenizer, [shown], cached, written)
            previous = found.id
            items: dict[str, Any] = {item.type: item for item in found.output}
            used = items.get("function_call")
            call = used and {"name": used.name, "arguments": json.loads(used.arguments)}
            thought = items["reasoning"].content[0].text if "reasoning" in items else ""
            answer(replay, found.output_text, thought, call)
            if call:
                result = {"type": "function_call_output", "call_id": used.call_id}
                given = [{**result, "output": result_of(call)}]
            else:
                given = [{"role": "user", "content": say(replay, turn + 1)}]
    assert replay.num_unchanged > 0.9 * len(replay.server.client.added[-1].prompt_token_ids)

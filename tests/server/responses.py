"""The Responses API through the official client: shared parts of its tests."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
from openai.types.responses import Response

from tests import waiting
from tests.server.running import MODEL, RunningServer
from tests.server.scripted import Script
from tests.waiting import WAIT_S

__all__ = [
    "ASKED", "CALL", "END", "THOUGHT", "TOOLS", "both", "check_events", "comparable", "last_prompt",
    "new_client", "prompt_of",
]  # fmt: skip

ASKED = "How warm is it in Rome?"
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
THOUGHT = "<think>\nThey ask for the weather.\n</think>\n\n"
END = "<|end|>"
TOOLS: Any = [
    {
        "type": "function",
        "name": "Weather",
        "description": "The weather of a place.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    }
]


def new_client(url: str, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=api_key,
        max_retries=0,
        timeout=WAIT_S,
        http_client=waiting.PatientClient(),
        _strict_response_validation=True,
    )


def both(client: openai.OpenAI, script: Script, text: str, **given: Any) -> Response:
    """The answer that the model is told to give, which a stream builds too."""
    asked: dict[str, Any] = {"model": MODEL, "input": ASKED, "max_output_tokens": 200, **given}
    whole = client.responses.create(**asked, extra_body={"seed": script.tell(text)})
    with client.responses.stream(**asked, extra_body={"seed": script.tell(text)}) as stream:
        events = list(stream)
    check_events(events)
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert comparable(last.response) == comparable(whole)
    return whole


def check_events(events: list[Any]) -> None:
    """Numbers, and one item after the other: added, its content, done with the same id."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert {event.response.id for event in events if hasattr(event, "response")} == {
        events[0].response.id
    }
    item = None
    count = itertools.count()
    for event, kind in list(zip(events, kinds, strict=True))[2:-1]:
        if kind == "output_item.added":
            assert item is None and event.output_index == next(count)
            item = event.item
        elif kind == "output_item.done":
            assert item is not None and (event.item.id, event.item.type) == (item.id, item.type)
            item = None
        else:
            assert item is not None and event.item_id == item.id
    assert item is None or kinds[-1] == "failed"


def comparable(response: Response) -> dict[str, Any]:
    found = json.loads(response.to_json())
    for item in found["output"]:
        for name in ("id", "call_id"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    names = ("output", "status", "incomplete_details", "error", "model", "text", "tools")
    usage = {n: v for n, v in found["usage"].items() if n != "input_tokens_details"}
    return {**{name: found.get(name) for name in names}, "usage": usage}


def prompt_of(server: RunningServer, client: openai.OpenAI, given: Any, **others: Any) -> str:
    """The prompt that the engine got."""
    client.responses.create(model=MODEL, input=given, max_output_tokens=1, **others)
    return last_prompt(server)


def last_prompt(server: RunningServer) -> str:
    tokenizer = server.backend.require().model.front.renderer.tokenizer
    assert tokenizer is not None
    tokens = server.client.added[-1].prompt_token_ids.tolist()
    return tokenizer.decode(tokens, skip_special_tokens=False)

"""SmolLM2 calls tools over HTTP: its template knows none, so they are described in words.

The file comes with a package of requirements-real.txt (`make test-real`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from tests import waiting
from tests.profiles import seeds
from tests.real.packages import smollm2_file
from tests.server.in_memory import RealClient
from tests.server.running import RunningServer, running_server

from quire import LLM
from quire.config.families.reader import read_model_spec
from quire.config.settings import EngineSettings
from quire.engine.model_front import load_model_front

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 16},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
SEEDS = seeds(100)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    file = smollm2_file()
    front = load_model_front(EngineSettings(), file, read_model_spec(file))
    with (
        LLM(str(file), quiet=True, num_kv_blocks=1024, max_model_len=512) as llm,
        running_server(front, client=RealClient(llm)) as found,
    ):
        yield found


def test_required_calls_all_parse(server: RunningServer) -> None:
    def call(seed: int) -> dict[str, Any]:
        body = {
            "messages": [{"role": "user", "content": "How warm will it be in Rome tomorrow?"}],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 120,
        }
        reply = waiting.post(f"{server.url}/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    with ThreadPoolExecutor(8) as threads:
        choices = list(threads.map(call, SEEDS))
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * len(SEEDS)
    for choice in choices:
        (found,) = choice["message"]["tool_calls"]
        assert found["function"]["name"] == "get_weather"
        jsonschema.validate(json.loads(found["function"]["arguments"]), PARAMETERS)

"""The examples that talk to a server, as their readers run them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.server.running import MODEL, RunningServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "structured_output.py"


def test_structured_output_runs_and_says_what_it_got(server: RunningServer) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), f"{server.url}/v1"],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith("name=")
    assert "pieces: name=" in second
    assert third in ("complaint", "praise", "question")


@pytest.mark.parametrize("question", ["Describe the city of Lima.", "?"])
def test_parsed_answers_are_instances(server: RunningServer, question: str) -> None:
    spec = importlib.util.spec_from_file_location("structured_output", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    city = module.ask(client, MODEL, question)
    assert 0 <= city.population <= 50_000_000
    pieces, city = module.stream(client, MODEL, question)
    assert module.City.model_validate_json("".join(pieces)) == city
    assert module.choose(client, MODEL, question, ["yes", "no"]) in ("yes", "no")

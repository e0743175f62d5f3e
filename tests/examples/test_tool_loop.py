"""The loop of tool calls, by the bundled model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM
from tests.server.in_memory import RealClient
from tests.server.running import RunningServer, bundled_front, running_server

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with (
        LLM(quiet=True, num_kv_blocks=512, max_model_len=512) as llm,
        running_server(bundled_front(), client=RealClient(llm)) as found,
    ):
        yield found


@pytest.mark.parametrize("example", ["tool_loop"])
def test_a_call_is_run_and_its_result_sent_back(
    example: str,
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Turns red when a call cannot be parsed, or the model does not take its own call back."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    loop = importlib.import_module(example)
    loop.main(["What is 6 times 7?", "--force", "--url", f"{server.url}/v1"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"calculate\(\{.*\}\) = -?\d+", lines[0]), lines
    assert len(lines) > 1

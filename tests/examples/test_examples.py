"""The examples run as their first lines say, with the bundled model."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.model_front import ModelFront
from tests.server.in_memory import RealClient
from tests.server.running import MODEL, RunningServer, bundled_front, running_server

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(request.param)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    front: ModelFront = bundled_front()
    with running_server(front) as found:
        yield found


@pytest.mark.parametrize("example", ["offline_batch"], indirect=True)
def test_offline_batch(example: ModuleType, tmp_path: Path):
    """Turns red when one bad prompt stops the others, or lines lose their order."""
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("import \n" + "import " * 3000 + "\ndef \n")
    example.main([str(prompts), str(answers), "--max-tokens", "4"])
    first, second, third = map(json.loads, answers.read_text().splitlines())
    assert first["text"] and first["finish_reason"] == "length" and first["prompt"] == "import "
    assert "context" in second["error"]
    assert third["prompt"] == "def " and third["text"]


@pytest.mark.parametrize("example", ["chat_loop"], indirect=True)
def test_chat_loop(example: ModuleType):
    """Turns red when the second turn computes the first one again."""
    said = iter(["What is your name? " * 8, "And who made you?", ""])
    written: list[str] = []
    with LLM(quiet=True) as llm:
        conversation = example.chat(llm, lambda: next(said), written.append)
    assert [turn["role"] for turn in conversation] == ["user", "assistant"] * 2
    cached = [int(re.findall(r"\[(\d+) tokens", text)[0]) for text in written]
    assert cached[0] == 0 < cached[1]


@pytest.mark.parametrize("example", ["custom_policy"], indirect=True)
def test_custom_policy(example: ModuleType):
    assert example.finishing_order("fcfs") == [24, 4, 12]
    assert example.finishing_order("custom_policy:ShortAnswersFirst") == [4, 12, 24]


@pytest.mark.parametrize("example", ["logits_processor"], indirect=True)
def test_logits_processor(example: ModuleType, capsys: pytest.CaptureFixture[str]):
    example.main(["import os"])
    text = capsys.readouterr().out.removesuffix("\n")
    assert re.fullmatch("[a-z ]+", text)


@pytest.mark.parametrize("example", ["grpo"], indirect=True)
def test_grpo(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Turns red when a ratio on policy is not 1, the trained model cannot be loaded, or torch has
    other threads for the gradient than those that were asked for."""
    curve, trained = tmp_path / "curve.json", tmp_path / "trained"
    sizes = ["--steps", "2", "--group", "2", "--max-tokens", "4", "--threads", "2"]
    num_threads = torch.get_num_threads()
    try:
        example.main([*sizes, "--output", str(curve), "--save", str(trained)])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
    figures = json.loads(curve.read_text())["figures"]
    assert figures["largest_ratio_error"]["values"] == [0, 0]
    assert len(capsys.readouterr().out.splitlines()) == len(figures["reward"]["values"]) == 2
    with LLM(str(trained), quiet=True, num_kv_blocks=64) as llm:
        assert llm.generate("import ", SamplingParams(max_tokens=4))[0].outputs[0].text


@pytest.mark.parametrize("example", ["embed_folder"], indirect=True)
def test_embed_folder(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Turns red when vectors belong to other files, or a long file stops the others."""
    (tmp_path / "below").mkdir()
    for name, text in {"a.txt": "import os", "below/b.txt": "What is your name?"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "long.txt").write_text("import " * 3000)
    example.main([str(tmp_path), "What is your name?", "--top", "2"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"1.000 {tmp_path / 'below' / 'b.txt'}"
    assert -1 <= float(second.split()[0]) < 1


@pytest.mark.parametrize("example", ["openai_streaming"], indirect=True)
def test_openai_streaming(
    example: ModuleType, server: RunningServer, capsys: pytest.CaptureFixture[str]
):
    example.main(["What is your name?", "--url", f"{server.url}/v1"])
    assert re.search(r".+\n\[\d+ tokens\]\n$", capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize("example", ["structured_output"], indirect=True)
def test_structured_output(
    example: ModuleType, server: RunningServer, capsys: pytest.CaptureFixture[str]
):
    """Turns red when an answer is no instance, or a stream loses a piece of it."""
    example.main(["--url", f"{server.url}/v1"])
    whole, streamed, choice = capsys.readouterr().out.splitlines()
    assert whole.startswith("name=")
    assert re.match(r"\d+ pieces: name=", streamed)
    assert choice in ("complaint", "praise", "question")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        pieces, city = example.stream(client, MODEL, "Describe the city of Lima.")
        assert example.City.model_validate_json("".join(pieces)) == city


@pytest.mark.parametrize("example", ["tokens_in_tokens_out"], indirect=True)
def test_tokens_in_tokens_out(
    example: ModuleType, server: RunningServer, capsys: pytest.CaptureFixture[str]
):
    example.main(["5", "6", "7", "--url", server.url, "--max-tokens", "3"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and last == "the same as a stream: True"
    assert all(re.fullmatch(r"\d+ -?\d+\.\d+", line) for line in lines)


@pytest.mark.parametrize("example", ["tool_loop"], indirect=True)
def test_tool_loop(example: ModuleType, capsys: pytest.CaptureFixture[str]):
    """Turns red when a call cannot be parsed, the model does not take its own call back, or the
    first thing that people try is wrong."""
    with (
        LLM(quiet=True, num_kv_blocks=512, max_model_len=512) as llm,
        running_server(bundled_front(), client=RealClient(llm)) as found,
    ):
        for force in ([], ["--force"]):
            example.main(["What is 123 times 45?", *force, "--url", f"{found.url}/v1"])
            call, answer = capsys.readouterr().out.splitlines()
            assert call == 'multiply({"a": 123, "b": 45}) = 5535'
            assert answer == "The result is 5535."


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("openai_agent", "agents"),
        ("langchain_agent", "langchain_openai"),
        ("llama_index_agent", "llama_index.llms.openai_like"),
    ],
)
def test_agents_answer_their_question(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Turns red when the question of an agent's first lines gets a wrong answer. The frameworks are
    no dependency: install one to run it."""
    pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES / "agents"))
    agent = importlib.import_module(name)
    asked = re.search(rf'{name}.py (".*?".*)', agent.__doc__ or "")
    assert asked is not None
    with (
        LLM(quiet=True, num_kv_blocks=512, max_model_len=512) as llm,
        running_server(bundled_front(), client=RealClient(llm)) as found,
    ):
        agent.main([*shlex.split(asked[1]), "--url", f"{found.url}/v1"])
    *_, answer = capsys.readouterr().out.splitlines()
    assert answer.endswith("The result is 42.")


def test_the_tool_of_agents_is_one_that_the_model_can_use():
    """Turns red when the bundled model calls it wrongly, also where no framework is installed."""
    questions = set[str]()
    for path in (EXAMPLES / "agents").glob("*.py"):
        text = path.read_text()
        asked = re.search(rf'{path.name} "(.*?)"', text)
        assert asked is not None and "def multiply(a: int, b: int) -> int:" in text
        questions.add(asked[1])
    number = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": number, "b": number}}
    tool: Any = {"name": "multiply", "description": "Multiply two integers."}
    tool["parameters"] = {**parameters, "required": ["a", "b"]}
    with LLM(quiet=True, num_kv_blocks=512, max_model_len=512) as llm:
        for question in questions:
            messages = [{"role": "user", "content": question}]
            params = SamplingParams(temperature=0, max_tokens=64)
            tools = [{"type": "function", "function": tool}]
            answer = llm.chat(messages, params, tools=tools)[0].outputs[0].answer
            (call,) = answer.tool_calls
            assert json.loads(call.function.arguments) == {"a": 6, "b": 7}


def test_every_example_is_listed_and_tested():
    """Turns red when an example is added without its line in the list, or without a test."""
    files = {path.name for path in EXAMPLES.glob("*.py")}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\w+\.py)\)", page)) == files
    tested = set(re.findall(r'"example", \["(\w+)"\]', Path(__file__).read_text()))
    assert {f"{name}.py" for name in tested} == files

"""`quire serve` as a process, and the other commands against it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from quire.entrypoints.cli.main import main
from tests import waiting
from tests.waiting import WAIT_S

CODE = "import sys; from quire.entrypoints.cli.main import main; sys.exit(main())"
START_S = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of the bundled model's server, and its process, which ends with status 0."""
    config = tmp_path_factory.mktemp("serve") / "serve.yaml"
    config.write_text("max-model-len: 256\nmax_num_seqs: 8\nport: 1\n")
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "serve", "--config", str(config), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        url, shown = _wait_until_ready(process)
        assert shown.count("attention: ") == 1, shown  # the kernels are told once
        watchdog.cancel()
        yield url, process
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, rest
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def _wait_until_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The address that the server says it has when it says that it is ready, and all it said."""
    assert process.stdout is not None
    shown: list[str] = []
    for line in process.stdout:
        shown.append(line)
        found = re.search(r"Uvicorn running on (http://\S+)", line)
        if found is not None:
            return found[1], "".join(shown)
    raise AssertionError("".join(shown))


def test_chat_and_complete_ask_it(
    server: tuple[str, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = server
    assert main(["chat", "--url", url, "-q", "What is your name?", "--temperature", "0"]) == 0
    answer = capsys.readouterr()
    assert len(answer.out.strip()) > 10
    assert "tokens/s" in answer.err
    assert main(["complete", "--url", url, "-q", "import os", "--max-tokens", "6"]) == 0
    assert "6 tokens in" in capsys.readouterr().err
    assert main(["complete", "--url", url, "-q", "import os", "--temperature", "-1"]) == 2
    assert "temperature" in capsys.readouterr().err


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(6))
def test_required_calls_can_be_parsed(server: tuple[str, subprocess.Popen[str]], seed: int) -> None:
    """The bundled model writes them itself, without a flag."""
    tool = {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}
    body = {
        "messages": [{"role": "user", "content": "How warm is it in Rome?"}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": seed,
        "max_tokens": 150,
    }
    reply = waiting.post(f"{server[0]}/v1/chat/completions", json=body)
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve_measures_it(
    backend: str,
    server: tuple[str, subprocess.Popen[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, _ = server
    file = tmp_path / "serve.json"
    arguments = ["--num-prompts", "6", "--input-len", "20", "--output-len", "4-9", "--no-limits"]
    kind = ["--backend", backend, "--output-json", str(file)]
    assert main(["bench", "serve", "--base-url", url, *arguments, *kind]) == 0
    record = json.loads(file.read_text())
    expected = record["workload"]["num_output_tokens"]
    assert record["figures"]["num_output_tokens"]["median"] == expected
    assert record["workload"]["model"] == "bundled"
    if backend == "openai":
        assert record["figures"]["num_prompt_tokens"]["median"] == 6 * 20
    assert "Failed requests:                         0" in capsys.readouterr().out


def test_a_port_in_use_is_one_line(
    server: tuple[str, subprocess.Popen[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded."""
    port = server[0].rpartition(":")[2]
    assert main(["serve", "--port", port]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"quire: error: Cannot listen on 127.0.0.1:{port}")
    assert error.count("\n") == 1


def test_no_such_folder_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before the port opens."""
    missing = str(tmp_path / "no-model")
    assert main(["serve", missing, "--port", "0"]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"quire: error: {missing}: no such folder")
    assert error.count("\n") == 1


def test_a_broken_model_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["UnheardOf"]}')
    ended = subprocess.run(
        [sys.executable, "-c", CODE, "serve", str(tmp_path), "--port", "0"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("quire: error: ")]
    assert len(errors) == 1
    assert "UnheardOf" in errors[0]
    assert ended.stderr.count("UnheardOf") == 1  # not in the log as well
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--host", "0.0.0.0"], "--api-key"),
        (["--prot", "1"], "did you mean --port?"),
        (["--scheduling-policy", "best"], "one of: fcfs, priority, srtf, two_level, fair"),
        (["--api-key", "a" * 16, "--api-key-weights", "2"], "--scheduling-policy fair"),
        (["--api-key-weights", "2"], "1 api_key_weights for 0 API keys"),
        (["--max-n", "0"], "max_n is 0"),
    ],
)
def test_bad_flags_are_one_line(
    arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["serve", *arguments]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    error = capfd.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1

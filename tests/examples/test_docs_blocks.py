"""The code of the pages runs: Python as a reader would type it, page by page; requests by curl are
answered; commands of quire are ones that its parser takes."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import quire
from quire import LLM
from quire.entrypoints.cli.parser import CommandParser
from quire.server.settings import ServerSettings
from tests.server.in_memory import RealClient
from tests.server.running import MODEL, RunningServer, bundled_front, running_server
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
BATCH = {
    "custom_id": "name",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "What is your name?"}], "max_tokens": 8},
}

NOT_RUN = {
    'LLM("organization/name"': "a model of the reader's",
    'LLM("sentence-transformers/': "a model from the hub",
    'LLM("Qwen/': "a model from the hub",
    'LLM("HuggingFaceTB/': "a model from the hub",
    'LLM("big.gguf"': "files of the reader's",
    '"my_hooks:others"': "modules of the reader's",
}
"""Beginnings of what no test can run, and why."""
ANSWERS = {
    "README.md": "42",
    "docs/responses.md": ".",
    "docs/structured-output.md": r'\{.*"name".*"age": *\d+.*\}',
    "docs/tools-and-reasoning.md": r"get_weather.*Rome",
    "docs/batches.md": r'"custom_id":\s*"name".*"status_code":\s*200',
}
"""Text that the code of a page prints, somewhere."""
CLIENTS = (httpx.Client, openai.OpenAI, anthropic.Anthropic)
"""Kinds of clients that a page leaves open, as a program may at its end."""


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [text for kind, text in found if kind == language]


def python_pages() -> list[Any]:
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in pages()
        if blocks(page, "python")
    ]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(quiet=True, num_kv_blocks=512, max_model_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("engine")
    settings = ServerSettings(
        disable_access_log=True,
        data_dir=str(tmp_path_factory.mktemp("kept")),
        enable_engine_control=True,
    )
    with (
        LLM(quiet=True, num_kv_blocks=512, max_model_len=512) as engine,
        running_server(bundled_front(), settings, RealClient(engine, folder=folder)) as found,
    ):
        yield found


@pytest.mark.parametrize("page", python_pages())
def test_python_of_a_page(
    page: Path,
    llm: LLM,
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fault: a reader gets an exception, or another answer than the page promises."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps(BATCH) + "\n")
    (tmp_path / "traces").mkdir()

    def made(*names: Any, **settings: Any) -> LLM:
        return LLM(*names, quiet=True, num_kv_blocks=64, **settings) if settings else llm

    monkeypatch.setattr(quire, "LLM", made)
    space: dict[str, Any] = {"llm": llm, "LLM": made, "SamplingParams": quire.SamplingParams}
    try:
        for text in blocks(page, "python"):
            said = re.sub(r"#.*", "", text)
            if not any(name in said for name in NOT_RUN):
                exec(compile(text.replace(URL, server.url), str(page), "exec"), space)
    finally:
        for client in [each for each in space.values() if isinstance(each, CLIENTS)]:
            client.close()
    expected = ANSWERS.get(str(page.relative_to(ROOT)))
    printed = capsys.readouterr().out
    assert expected is None or re.search(expected, printed, re.DOTALL), printed


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each line in blocks that name no language."""
    for text in blocks(page, ""):
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith(("quire ", "curl ")):
                yield shlex.split(line, comments=True)


def test_requests_by_curl_are_answered(server: RunningServer) -> None:
    seen = 0
    for page in pages():
        for words in commands(page):
            if words[0] != "curl":
                continue
            url, body = words[1].replace(URL, server.url), None
            if "-d" in words:
                body = json.loads(words[words.index("-d") + 1])
            if body is not None and "model" in body:
                body["model"] = MODEL
            method = "GET" if body is None else "POST"
            reply = httpx.request(method, url, json=body, timeout=WAIT_S)
            assert reply.status_code == 200, (page.name, body, reply.text)
            seen += 1
    assert seen >= 7


def test_commands_are_ones_that_quire_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a flag was renamed, and a page still names it."""
    seen = 0
    for page in pages():
        for words in commands(page):
            if words[0] == "quire":
                parser = CommandParser(prog=f"quire {words[1]}")
                module = importlib.import_module(
                    f"quire.entrypoints.cli.{words[1].replace('-', '_')}"
                )
                module.add_arguments(parser)
                try:
                    parser.parse_args(words[2:])
                except SystemExit:
                    pytest.fail(f"{page.name}: {words}: {capsys.readouterr().err}")
                seen += 1
    assert seen >= 30

"""The demo is the first thing that anybody runs."""

from __future__ import annotations

import re

import pytest

from quire.cli.main import main


def test_demo_completes_answers_and_says_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    """It must need no flags, no network and no tokenizer but its own."""
    assert main(["demo", "--max-tokens", "5", "--num-threads", "1", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "completion of 'import os" in shown
    assert "answer to 'What is your name?'" in shown
    assert "5 tokens in" in shown
    assert len(re.findall(r"\d+ tokens/s", shown)) == 3


def test_demo_reports_a_refused_prompt_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "word " * 400, "--max-model-len", "64"]
    assert main(["demo", *arguments, "--num-threads", "1", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("quire: error: ")

"""Variables that look like quire's and set nothing."""

from __future__ import annotations

import pytest

from quire.entrypoints.cli.main import main


def warnings_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(list(arguments)) == 0
    return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]


def test_a_misspelt_variable_is_told_with_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its flag would silently keep a default."""
    monkeypatch.setenv("QUIRE_MAX_MODL_LEN", "3")
    monkeypatch.setenv("QUIRE_NO_ENABLE_PREFIX_CACHING", "true")
    monkeypatch.setenv("QUIRE_ZZZ", "x")
    assert warnings_of(capsys, "plan", "--max-model-len", "64") == [
        "quire: warning: the variable QUIRE_MAX_MODL_LEN sets nothing; did you mean "
        "QUIRE_MAX_MODEL_LEN?",
        "quire: warning: the variable QUIRE_NO_ENABLE_PREFIX_CACHING sets nothing; did you mean "
        "QUIRE_ENABLE_PREFIX_CACHING?",
        "quire: warning: the variable QUIRE_ZZZ sets nothing",
    ]


def test_what_any_command_knows_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine sets them once for all commands; Kubernetes sets some by itself."""
    for name, value in (
        ("QUIRE_PORT", "9000"),  # of serve
        ("QUIRE_NUM_ITERS", "3"),  # of bench latency
        ("QUIRE_URL", "http://127.0.0.1:1"),  # of chat
        ("QUIRE_CPU_ISA", "none"),
        ("QUIRE_SOAK", "1"),
        ("QUIRE_MAX_MODEL_LN", ""),
        ("QUIRE_SERVICE_HOST", "10.0.0.1"),
        ("QUIRE_SERVICE_PORT", "80"),
        ("QUIRE_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("QUIRETTE", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert warnings_of(capsys, "plan", "--max-model-len", "64") == []

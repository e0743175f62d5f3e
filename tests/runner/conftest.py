"""Engines that tests of the runner start, with rows on the host or on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import LLM
from tests.runner.late_device import keep_rows_on_device


@pytest.fixture
def engines() -> Iterator[list[LLM]]:
    started: list[LLM] = []
    yield started
    for engine in started:
        engine.shutdown()


@pytest.fixture(params=[False, True], ids=["host", "device"])
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        keep_rows_on_device(monkeypatch)
    return request.param

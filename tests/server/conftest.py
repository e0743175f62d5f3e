from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from quire.engine.model_front import ModelFront
from tests import waiting
from tests.server.running import RunningServer, bundled_front, running_server
from tests.server.scripted import Script

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="session")
def front() -> ModelFront:
    return bundled_front()


@pytest.fixture(scope="module")
def server(front: ModelFront) -> Iterator[RunningServer]:
    with running_server(front) as found:
        yield found


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A client of the module's server; no request and no block may be left behind."""
    with waiting.PatientClient(base_url=server.url) as client:
        yield client
    server.wait_until_idle()


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The official client of the module's server, as strict as the published types."""
    from tests.server.responses import new_client

    with new_client(server.url) as found:
        yield found
    server.wait_until_idle()


@pytest.fixture
def script(server: RunningServer, front: ModelFront) -> Iterator[Script]:
    """Answers that the model of the server is told to give."""
    with Script(server, front) as found:
        yield found


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="q") as path:
        yield Path(path)

"""Requests that schemathesis makes of /openapi.json, for every route: each is answered, or refused
with a status that the schema names, and never by a fault of the server.

The package is no dependency: `pip install schemathesis` for it. A soak of 20 makes over 3,000 cases
(`make soak ROOMS=tests/server/test_schema_cases.py NAME=schema_cases`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given

from quire.engine.model_front import ModelFront
from quire.server.settings import ServerSettings
from tests import waiting
from tests.profiles import examples
from tests.server.in_memory import InMemoryClient
from tests.server.running import MODEL, RunningServer, running_server

schemathesis: Any = pytest.importorskip("schemathesis")

MAX_LEN = 48
"""Context of the served model: any number of tokens may be asked for."""
VALID, INVALID = 3, 2
"""Cases of each operation that the schema allows, and that it does not."""
UNMET = "(deadline_s)"
"""In refusals of requests that ask for an answer sooner than there can be one."""
PARTS = 8
"""Tests among which the operations are shared out, so that each says how far a soak has come."""
AWAKE = ("/wake_up", "/resume")
"""Routes after which an engine computes that may have been asleep or paused."""


@pytest.fixture(scope="module")
def server(front: ModelFront, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = ServerSettings(
        disable_access_log=True,
        data_dir=str(tmp_path_factory.mktemp("kept")),
        enable_engine_control=True,
    )
    engine = InMemoryClient(max_model_len=MAX_LEN)
    with running_server(front, settings, engine) as found:
        yield found


@pytest.fixture(scope="module")
def operations(server: RunningServer) -> list[Any]:
    """Return the operations of the schema."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


def test_every_operation_is_tried(server: RunningServer, operations: list[Any]) -> None:
    document = waiting.get(f"{server.url}/openapi.json").json()
    assert len(operations) == sum(map(len, document["paths"].values()))


@pytest.mark.parametrize("part", range(PARTS))
def test_cases(
    server: RunningServer,
    operations: list[Any],
    part: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.chdir(tmp_path)  # for what profiles write
    counts: Counter[str] = Counter()
    faults: dict[str, str] = {}
    found = operations[part::PARTS]
    with waiting.PatientClient(base_url=server.url) as http:
        for operation in found:
            for mode, count in (("POSITIVE", VALID), ("NEGATIVE", INVALID)):
                _try(server, operation, mode, count, counts, faults)
            for path in AWAKE:
                http.post(path).raise_for_status()
    for status, count in sorted(counts.items()):
        record_property(f"status {status}", count)
    record_property("cases", sum(counts.values()))
    record_property("operations", len(found))
    assert not faults, "\n".join(f"{where}: {what}" for where, what in sorted(faults.items()))
    assert sum(counts.values()) >= len(found)
    _unpin(server)
    server.wait_until_idle()


def _unpin(server: RunningServer) -> None:
    """Let go of the prefixes that some cases have pinned."""
    with waiting.PatientClient(base_url=server.url) as http:
        for each in http.get("/admin/prefixes").json()["prefixes"]:
            http.delete(f"/admin/prefixes/{each['id']}").raise_for_status()


def _try(
    server: RunningServer,
    operation: Any,
    mode: str,
    count: int,
    counts: Counter[str],
    faults: dict[str, str],
) -> None:
    """Make cases of an operation; note one fault of each status."""
    statuses = operation.definition.raw["responses"]
    try:
        strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])
    except Exception:
        if mode == "POSITIVE":
            raise
        return  # without parameters and body nothing is invalid

    @examples(
        count, deadline=None, suppress_health_check=list(HealthCheck), database=None,
        phases=[Phase.generate],
    )  # fmt: skip
    @given(case=strategy)
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL  # or most would say that there is no such model
        reply = case.call(base_url=server.url)
        status = str(reply.status_code)
        counts[status] += 1
        told = f"{case.as_curl_command()[:600]} -> {reply.text[:300]}"
        if status not in statuses:
            faults.setdefault(f"{operation.label} gives {status}, not in the schema", told)
            return
        if reply.status_code >= 500 and UNMET not in reply.text:
            faults.setdefault(f"{operation.label} gives {status}", told)
        (kind,) = reply.headers["content-type"]
        kind = kind.partition(";")[0]
        if kind not in statuses[status]["content"]:
            faults.setdefault(f"{operation.label} gives {status} as {kind!r}", told)
        if reply.status_code != 200 and kind == "application/json":
            body = reply.json()
            if "error" in body and not body["error"]["message"]:
                faults.setdefault(f"{operation.label} gives {status} without a word", told)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check()
        except Exception as error:
            if mode == "NEGATIVE" and "Unsatisfiable" in type(error).__name__:
                return
            raise

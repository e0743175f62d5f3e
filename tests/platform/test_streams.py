"""Commands whose output cannot be written or encoded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests import waiting
from tests.client.scripted_server import Script, serve_script
from tests.waiting import WAIT_S, wait_for

QUIRE = f"{sys.executable} -m quire"
OVER_A_FAKE_CORE = f"{sys.executable} {Path(__file__).with_name('fake_core_serve.py')}"
"""The same, whose cores compute with no torch."""
ENGINE = "--max-model-len 128 --num-kv-blocks 64 --num-threads 1"


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        check=False,
        timeout=WAIT_S,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize(
    ("redirection", "status", "said"),
    [
        (">/dev/full", 1, "quire: error: the output cannot be written (No space left on device)"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        (">&- 2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_a_plan_that_nobody_can_read(redirection: str, status: int, said: str) -> None:
    """Fault: a traceback, or a file of the model in the place of a closed stream."""
    done = shell(f"{QUIRE} plan {redirection}")
    error = done.stderr.decode()
    assert done.returncode == status, error
    assert error.startswith(said) and error.count("\n") == bool(said), error


def test_errors_that_cannot_be_told_keep_their_status() -> None:
    for stream in ("2>/dev/full", "2>&-"):
        assert shell(f"{QUIRE} plan --dtype int3 {stream}").returncode == 2


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_texts_that_an_encoding_lacks_are_escaped(encoding: str) -> None:
    script = Script(words=("é", " 日本", " \U0001f600"))
    with serve_script(script) as url:
        done = shell(f"{QUIRE} complete --url {url} -q x", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("latin-1").endswith(" \\u65e5\\u672c \\U0001f600\n")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("streams", "quire"),
    [("full", OVER_A_FAKE_CORE), ("closed", QUIRE), ("gone", OVER_A_FAKE_CORE)],
    ids=["full", "closed", "gone"],
)
def test_a_server_outlives_its_output(streams: str, quire: str) -> None:
    """At its start, and later: requests are answered, and it ends as asked."""
    uds = Path(f"/tmp/quire-{os.getpid()}-{streams}")
    redirection = {"full": ">/dev/full 2>&1", "closed": "<&- >&- 2>&-", "gone": "2>&1"}[streams]
    command = f"exec {quire} serve --uds {uds} {ENGINE} --served-model-name 日本 {redirection}"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    if streams == "gone":
        assert b"listens on" in process.stdout.readline()
        process.stdout.close()
    try:
        wait_for(uds.exists, "the socket")
        transport = httpx.HTTPTransport(uds=str(uds))
        with waiting.PatientClient(transport=transport, base_url="http://localhost") as http:
            wait_for(lambda: http.get("/readyz").status_code == 200, "readiness")
            body = {"model": "日本", "prompt": "x", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
            assert http.post("/v1/completions", json={"prompt": 5}).status_code == 400
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        if streams != "gone":
            assert b"Traceback" not in process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        uds.unlink(missing_ok=True)

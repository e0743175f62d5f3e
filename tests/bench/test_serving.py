"""`quire bench serve`: arrivals, times, figures, and the whole of it against a scripted server."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import ConfigError, EngineError
from quire.entrypoints.bench.serving_figures import parse_goodput, serving_figures
from quire.entrypoints.bench.serving_load import Arrivals, Load, LoadResult, run_load
from quire.entrypoints.bench.serving_stream import AnswerReader, AnswerTimes
from quire.entrypoints.cli.flags.bench import bench_command
from quire.entrypoints.cli.main import main
from quire.entrypoints.client import ServerAddress
from tests.client.scripted_server import Script, serve_script
from tests.waiting import WAIT_S

SMALL = ["--input-len", "5", "--output-len", "3", "--num-prompts", "6", "--no-limits"]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """A scale that forgets the shape changes the rate with the burstiness."""
    times = Arrivals(20.0, burstiness).times(100_000, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.05)


def test_arrivals_all_at_once_and_repeatable() -> None:
    assert Arrivals(float("inf"), 1.0).times(3, seed=0) == [0.0] * 3
    some = Arrivals(3.0, 1.0)
    assert some.times(5, seed=1) == some.times(5, seed=1) != some.times(5, seed=2)
    assert some.times(1, seed=1) == [0.0]
    for rate, burstiness in ((0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)):
        with pytest.raises(ConfigError, match="above 0"):
            Arrivals(rate, burstiness)


STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b": keep-alive\n\n"
    b'data: {"choices":[{"index":0,"text":"\xc3\xa9","finish_reason":null}]}\r\n\r\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"b"}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":7}}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_an_answer_is_read_the_same_however_it_is_cut(cuts: list[int]) -> None:
    """The network cuts anywhere, also inside a character or a line end."""
    reader, places = AnswerReader(10.0), [0, *sorted(cuts), len(STREAM)]
    for number, (low, high) in enumerate(pairwise(places)):
        reader.feed(200, STREAM[low:high], 11.0 + number)
    times = reader.finish(200, 99.0)
    assert times.error is None
    assert (times.num_prompt_tokens, times.num_output_tokens) == (4, 7)
    assert len(times.chunks) == 3  # the role alone is no output
    assert times.chunks == sorted(times.chunks)
    assert times.end == times.chunks[-1]


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, b'data: {"choices":[{"text":"a"}]}\n\n', "without .DONE."),
        (200, b'data: {"error":{"message":"lost"}}\n\ndata: [DONE]\n\n', "lost"),
        (200, b"data: [DONE]\n\n", "empty"),
        (200, b"data: {nonsense\n\n", "no JSON"),
        (429, b'{"error":{"message":"too many"}}', "status 429: too many"),
        (502, b"<html>", "status 502: <html>"),
    ],
)
def test_a_failed_answer_is_not_counted_as_a_fast_one(
    status: int, body: bytes, sentence: str
) -> None:
    reader = AnswerReader(0.0)
    reader.feed(status, body, 1.0)
    error = reader.finish(status, 2.0).error
    assert error is not None
    assert sentence.replace(".DONE.", "[DONE]") in error


@pytest.mark.parametrize(
    ("delta", "is_output"),
    [
        ({"role": "assistant", "content": None}, False),
        ({"role": "assistant", "content": ""}, False),
        ({"content": "a"}, True),
        ({"reasoning": "a", "reasoning_content": "a"}, True),
        ({"reasoning_content": "a"}, True),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, True),
    ],
    ids=str,
)
def test_thinking_and_calls_are_output_too(delta: dict[str, Any], is_output: bool) -> None:
    reader = AnswerReader(0.0)
    event = json.dumps({"choices": [{"delta": delta}]})
    reader.feed(200, f"data: {event}\n\n".encode(), 1.0)
    assert len(reader.finish(200, 2.0).chunks) == is_output


def test_figures_of_known_times() -> None:
    """The definitions, by hand: two answers, of 3 tokens in 3 chunks and of 4 tokens in 2."""
    first = AnswerTimes(0.0, 0.4, [0.1, 0.2, 0.4], num_prompt_tokens=5, num_output_tokens=3)
    second = AnswerTimes(0.2, 1.7, [0.5, 1.7], num_prompt_tokens=7, num_output_tokens=4)
    failed = AnswerTimes(0.0, 9.0, [0.1], error="lost")
    found = serving_figures(LoadResult((first, second, failed), 2.0, 0.1), {"ttft": 200})
    assert (found.num_completed, found.errors) == (2, ("lost",))
    assert found.requests_per_s == 1.0
    assert found.output_tokens_per_s == 3.5
    assert found.total_tokens_per_s == 9.5
    assert found.goodput_per_s == 0.5
    assert found.peak_concurrency == 2
    assert found.peak_output_tokens_per_s == 5.0  # in the second from 0.1 on: 3 and 2 of 4
    assert found.latencies_ms["ttft"] == pytest.approx([100, 300])
    assert found.latencies_ms["tpot"] == pytest.approx([150, 400])
    assert found.latencies_ms["itl"] == pytest.approx([100, 200, 1200])
    assert found.latencies_ms["e2el"] == pytest.approx([400, 1500])
    statistics = found.statistics(["ttft"], [50, 99])
    assert statistics["mean_ttft_ms"] == pytest.approx(200)
    assert statistics["p99_ttft_ms"] == pytest.approx(298)
    with pytest.raises(EngineError, match=r"All 1 requests failed\. The first: lost"):
        serving_figures(LoadResult((failed,), 2.0, 0.1), {})


def test_goals_of_goodput() -> None:
    assert parse_goodput(["ttft:100", "e2el:2.5"]) == {"ttft": 100.0, "e2el": 2.5}
    for text in ("ttft", "itl:3", "ttft:-1", "ttft:x"):
        with pytest.raises(ConfigError, match="ttft:100"):
            parse_goodput([text])


def test_the_table_and_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.json"
    script = Script()
    with serve_script(script) as url:
        status = main(
            ["bench", "serve", "--base-url", url, *SMALL, "--repeats", "2", "--request-rate", "200",
             "--max-concurrency", "2", "--goodput", "ttft:10000", "--percentile-metrics",
             "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--output-json", str(file)]
        )  # fmt: skip
    table, record = capsys.readouterr().out, json.loads(file.read_text())
    assert status == 0
    for label, value in (
        ("Successful requests:", "12"), ("Failed requests:", "0"),
        ("Maximum request concurrency:", "2"), ("Request rate configured (RPS):", "200.00"),
        ("Total input tokens:", "24"), ("Total generated tokens:", "18"),
    ):  # fmt: skip
        assert f"{label:<40} {value}" in table
    for words in ("Request goodput (req/s):", "P99 TTFT (ms):", "Median E2EL (ms):"):
        assert words in table
    figures = record["figures"]
    assert len(figures["output_tokens_per_s"]["values"]) == 2
    assert figures["peak_concurrency"]["high"] <= 2
    assert figures["median_ttft_ms"]["median"] > 0
    assert record["workload"]["num_output_tokens"] == 18
    assert record["workload"]["outputs"] == {"distribution": "LengthRange", "low": 3, "high": 3}
    bodies = [body for path, body in script.seen if path == "/v1/completions"]
    assert len(bodies) == 13  # one of them a warm-up
    assert {len(body["prompt"]) for body in bodies} == {5}
    assert {token for body in bodies for token in body["prompt"]} == {3, 5, 9}
    assert all(body["max_tokens"] == 3 and body["ignore_eos"] for body in bodies)


def test_each_run_draws_new_prompts_unless_a_seed_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fault: a repeated run measures the prefix cache of the server."""

    def run(*flags: str) -> list[list[int]]:
        script = Script()
        with serve_script(script) as url:
            arguments = ["--url", url, "--vocab-size", "30000", "--num-warmups", "0", *flags]
            assert main(["bench", "serve", *SMALL, *arguments]) == 0
        return sorted(body["prompt"] for path, body in script.seen if "/completions" in path)

    first, second = run(), run()
    assert not {tuple(ids) for ids in first} & {tuple(ids) for ids in second}
    seed = re.findall(r"--bench-seed (\d+) repeats them", capsys.readouterr().err)[-1]
    assert run("--bench-seed", seed) == second
    assert "repeats them" not in capsys.readouterr().err


def test_chats_are_made_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    with serve_script(script) as url:
        arguments = ["--url", url, "--backend", "openai-chat", "--extra-body", '{"top_k": 1}']
        assert main(["bench", "serve", *SMALL, *arguments, "--vocab-size", "7"]) == 0
    bodies = [body for path, body in script.seen if path == "/v1/chat/completions"]
    assert len(bodies) == 7
    assert all(len(body["messages"][0]["content"].split()) == 5 for body in bodies)
    assert bodies[0]["top_k"] == 1
    assert "/tokenize" not in {path for path, _ in script.seen}


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--num-warmups", "0"], 1, "All 6 requests failed. The first: the engine was restarted"),
        ([], 1, "A first request to"),
        (["--input-len", "300"], 2, "do not fit max_model_len=256"),
        (["--model", "none"], 2, "no model 'none'"),
        (["--extra-body", "[]"], 2, "Give a JSON object"),
        (["--percentile-metrics", "speed"], 2, "Give some of: ttft"),
        (["--metric-percentiles", "101"], 2, "Give numbers such as"),
    ],
)
def test_what_goes_wrong_is_one_line(
    arguments: list[str], status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_script(Script(fail="error")) as url:
        assert main(["bench", "serve", "--base-url", url, *SMALL, *arguments]) == status
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_slow_server_does_not_hold_the_benchmark_forever() -> None:
    script = Script(words=["a", "b"], gap_s=60.0)
    with serve_script(script) as url:
        load = Load(
            address=ServerAddress.parse(url), headers={}, path="/v1/completions", bodies=[b"{}"],
            arrivals=[0.0], max_concurrency=None, timeout_s=0.2,
        )  # fmt: skip
        result = run_load(load)
    assert result.answers[0].error == "no end after 0.2 s"
    assert result.duration_s < 60.0


def test_connections_are_used_again() -> None:
    """A handshake per request would be part of each time to first token."""
    script = Script()
    with serve_script(script) as url:
        load = Load(
            address=ServerAddress.parse(url), headers={}, path="/v1/completions",
            bodies=[b'{"max_tokens": 2}'] * 20, arrivals=[0.0] * 20, max_concurrency=1,
            timeout_s=WAIT_S,
        )  # fmt: skip
        result = run_load(load)
    assert [answer.error for answer in result.answers] == [None] * 20
    assert script.num_connections == 1
    alone = sorted((answer.start, answer.end) for answer in result.answers)
    assert all(before[1] <= after[0] for before, after in pairwise(alone))


def test_keys_do_not_get_into_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["quire", "--api-key", "secret", "--api-key=secret", "-x"])
    assert bench_command() == ("quire", "--api-key", "***", "--api-key=***", "-x")

"""Traces that are drawn and traces that are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.entrypoints.simulator.workloads import (
    PREFIX_TOKENS,
    TRACE_NAMES,
    Piece,
    TraceRequest,
    draw_chat_prompts,
    draw_trace,
    read_trace,
)
from quire.entrypoints.simulator.workloads.trace import at_rate, check_fits

OURS = '{"arrival_s": 1.5, "prompt_tokens": 7, "output_tokens": 3}'


@pytest.mark.parametrize(
    ("kind", "prompt", "output"), [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)]
)
def test_lengths_have_the_means_of_the_papers_figure_11(
    kind: str, prompt: float, output: float
) -> None:
    trace = draw_trace(kind, rate=20, seconds=1000, seed=0, max_model_len=2048)
    assert np.mean([r.prompt_tokens for r in trace]) == pytest.approx(prompt, rel=0.03)
    assert np.mean([r.output_tokens for r in trace]) == pytest.approx(output, rel=0.03)
    assert max(r.num_tokens for r in trace) <= 2048


def test_arrivals_are_poisson() -> None:
    """Gaps as long as they vary; turns red for arrivals at equal distances."""
    times = [r.arrival_s for r in draw_trace("alpaca", rate=5, seconds=2000, seed=3,
                                             max_model_len=2048)]  # fmt: skip
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("kind", TRACE_NAMES)
def test_traces_are_ordered_and_the_same_for_the_same_seed(kind: str) -> None:
    def draw(seed: int) -> list[TraceRequest]:
        return draw_trace(kind, rate=2, seconds=100, seed=seed, max_model_len=4096)

    trace = draw(5)
    assert trace == draw(5) != draw(6)
    times = [request.arrival_s for request in trace]
    assert times == sorted(times)
    assert min(min(r.prompt_tokens, r.output_tokens) for r in trace) >= 1


def test_translations_share_their_prefix_and_chat_prompts_are_cut() -> None:
    for prefix in PREFIX_TOKENS:
        trace = draw_trace(f"translation-{prefix}", rate=9, seconds=50, seed=0, max_model_len=2048)
        assert {r.pieces for r in trace} == {(Piece(prefix, prefix),)}
        assert min(r.prompt_tokens for r in trace) > prefix
    chat = draw_chat_prompts(rate=5, seconds=200, seed=0)
    assert max(r.prompt_tokens for r in chat) == max(r.output_tokens for r in chat) == 1024
    assert np.mean([r.prompt_tokens == 1024 for r in chat]) > 0.4


def test_a_trace_can_be_stretched_and_checked() -> None:
    trace = at_rate([TraceRequest(t, 5, 5) for t in (2.0, 3.0, 6.0)], rate=0.5)
    assert [r.arrival_s for r in trace] == [0.0, 1.0, 4.0]
    with pytest.raises(ConfigError, match=r"Request 1 .* has 5 \+ 5 tokens"):
        check_fits(trace, 9)
    check_fits(trace, 10)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_our_own_format_is_read_in_order_from_second_0(tmp_path: Path) -> None:
    shared = json.dumps(
        {"arrival_s": 0.5, "prompt_tokens": 9, "output_tokens": 2, "prefix_id": 4,
         "prefix_tokens": 8}
    )  # fmt: skip
    assert read_trace(write(tmp_path, f"{OURS}\n\n{shared}\n")) == [
        TraceRequest(0.0, 9, 2, (Piece(4, 8),)),
        TraceRequest(1.0, 7, 3),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,100,0,100,API log\n"
            "65,ChatGPT,1087,230,1317,Conversation log\n",
            [TraceRequest(0.0, 472, 18), TraceRequest(60.0, 1087, 230)],
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n",
            [TraceRequest(0.0, 4808, 10), TraceRequest(0.052, 3180, 8)],
        ),
        (
            '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
            '{"timestamp": 30535, "input_length": 513, "output_length": 26, "hash_ids": [46, 9]}\n',
            [
                TraceRequest(0.0, 600, 52, (Piece(46, 512), Piece(47, 512))),
                TraceRequest(3.053, 513, 26, (Piece(46, 512), Piece(9, 512))),
            ],
        ),
    ],
    ids=["burstgpt", "azure", "mooncake"],
)
def test_public_formats_are_read(tmp_path: Path, text: str, expected: list[TraceRequest]) -> None:
    found = read_trace(write(tmp_path, text))
    assert [(r.prompt_tokens, r.output_tokens, r.pieces) for r in found] == [
        (r.prompt_tokens, r.output_tokens, r.pieces) for r in expected
    ]
    assert [r.arrival_s for r in found] == pytest.approx([r.arrival_s for r in expected])


def changed(**changes: object) -> str:
    return json.dumps({**json.loads(OURS), **changes})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"arrival_s": 1, "prompt_tokens": 7}', "output_tokens is missing"),
        (changed(arrival_s=None), "arrival_s is missing"),
        (changed(arrival_s=-0.5), "time does not run before 0"),
        (changed(arrival_s="soon"), "arrival_s is 'soon': give a number"),
        (changed(arrival_s=True), "give a number"),
        (changed(prompt_tokens=0), "prompt_tokens is 0: give a whole number from 1"),
        (changed(prompt_tokens=7.5), "prompt_tokens is 7.5"),
        (changed(output_tokens=10**9), "output_tokens is 1000000000"),
        (changed(output_tokens=float("nan")), "give a number"),
        (changed(prefix_id=1), "prefix_tokens is missing"),
        (changed(prefix_id=1, prefix_tokens=8), "more than the 7 of the prompt"),
        (changed(prefix_id="a", prefix_tokens=3), "prefix_id is 'a'"),
        ("[1, 2]", "is no object"),
        ('{"arrival_s": 1', "is no JSON"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": 3}', "hash_ids"),
    ],
)
def test_impossible_lines_are_refused_by_their_number(
    tmp_path: Path, line: str, complaint: str
) -> None:
    """Turns red when a request is dropped silently, or the wrong line is named."""
    path = write(tmp_path, f"{OURS}\n{OURS}\n{line}\n{OURS}\n")
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert f"{path}, line 3: " in str(raised.value)
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "columns \\(none\\)"),
        ("a,b\n1,2\n", "line 1: columns a, b are those of no trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2: TIMESTAMP is 'noon'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n",
         "line 2: GeneratedTokens is missing"),
    ],
)  # fmt: skip
def test_files_that_are_no_traces_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_trace(write(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing")

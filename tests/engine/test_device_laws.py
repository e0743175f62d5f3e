"""The laws over rows that live on a device: here the CPU, with the kernels that it has.

The device draws, edits logits and finds log-probabilities; Python logits processors and beams take
the way over the host.
Results come as late as they may, and host memory is watched that the device may still read
(tests/runner/late_device.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams
from tests.engine.test_laws import TINY, assert_same, workload, written
from tests.pairs import LAWS_BY_PAIRS
from tests.runner.late_device import keep_rows_on_device
from tests.small_engines import SMALL

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@pytest.fixture(scope="session", params=["bundled", *(c.name for c in TINY if c.name != "lfm2")])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Without LFM2, whose states live on the host."""
    return written(request.param, tmp_path_factory)


class Maker:
    """Engines with rows on the device, or on the host."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self.engines: list[LLM] = []
        self.on_device = True

    def __call__(self, **settings: Any) -> LLM:
        self.engines.append(LLM(self._folder, **{**SMALL, **settings}))
        return self.engines[-1]


@pytest.fixture
def make(model: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    maker = Maker(model)
    keep_rows_on_device(monkeypatch, lambda: maker.on_device)
    yield maker
    for engine in maker.engines:
        engine.shutdown()


def params(index: int, max_tokens: int = 16, **more: Any) -> SamplingParams:
    temperature = (0.0, 0.8, 1.3)[index % 3]
    return SamplingParams(
        temperature=temperature, seed=index, max_tokens=max_tokens, ignore_eos=True,
        top_k=20 * (index % 2), **more,
    )  # fmt: skip


def run(llm: LLM, **more: Any) -> list[RequestOutput]:
    prompts = workload()
    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [params(i, **more) for i in range(len(prompts))],
        use_tqdm=False,
    )


def assert_as_on_host(got: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """The same tokens; log-probabilities up to float32, in which the host sums and a device does
    not."""
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.error is None, mine.error
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert one.finish_reason == other.finish_reason
            assert one.token_ids == other.token_ids
            assert (one.logprobs is None) == (other.logprobs is None)
            for left, right in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert [(token, entry.rank) for token, entry in left.items()] == [
                    (token, entry.rank) for token, entry in right.items()
                ]
                values = [entry.logprob for entry in right.values()]
                assert [entry.logprob for entry in left.values()] == pytest.approx(
                    values, rel=1e-5, abs=1e-5
                )


def on_host(make: Maker, **settings: Any) -> LLM:
    make.on_device = False
    llm = make(**settings)
    make.on_device = True
    return llm


@DEPTHS
def test_rows_on_the_device_give_what_rows_on_the_host_do(make: Maker, depth: int) -> None:
    expected = run(on_host(make))
    assert_as_on_host(run(make(depth=depth)), expected)
    assert_as_on_host(run(make(depth=depth, max_num_batched_tokens=11)), expected)


@DEPTHS
def test_penalties_and_bans_are_the_same_on_the_device(make: Maker, depth: int) -> None:
    """Counted from tokens of which the host does not know the last ones yet; when preempted too."""
    asked: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "min_tokens": 5,
        "stop_token_ids": [3, 9, 17],
        "bad_words_token_ids": [[5], [8, 30]],
        "logprobs": 3,
        "max_tokens": 18,
    }
    expected = run(on_host(make), **asked)
    assert_as_on_host(run(make(depth=depth), **asked), expected)
    small = make(depth=depth, num_kv_blocks=64, max_model_len=48)
    assert_as_on_host(run(small, **asked), expected)


def test_batched_is_alone(make: Maker) -> None:
    llm = make(enable_prefix_caching=False)
    alone = [
        llm.generate({"prompt_token_ids": prompt}, params(i), use_tqdm=False)[0]
        for i, prompt in enumerate(workload())
    ]
    assert_same(run(llm), alone)


def test_preempted_is_not(make: Maker) -> None:
    llm = make(num_kv_blocks=64, max_model_len=48)
    assert_same(run(llm, max_tokens=18), run(make(), max_tokens=18))


def test_swapped_is_not(make: Maker) -> None:
    swap = {"num_kv_blocks": 64, "swap_space": "64MiB", "preemption_mode": "swap"}
    llm = make(max_model_len=48, **swap)
    assert_same(run(llm, max_tokens=18), run(make(), max_tokens=18))


@DEPTHS
def test_hit_in_host_memory_is_cold(make: Maker, depth: int) -> None:
    """Blocks go through the buffer, beside the kernels of steps."""
    cold = run(make(enable_prefix_caching=False), max_tokens=18)
    llm = make(depth=depth, num_kv_blocks=64, max_model_len=48, swap_space="64MiB")
    others = [{"prompt_token_ids": [token + 1 for token in prompt]} for prompt in workload()]
    for _ in range(3):
        assert_same(run(llm, max_tokens=18), cold)
        llm.generate(others, params(0, 18), use_tqdm=False)
    assert llm.engine.client.stats().blocks_loaded_total > 0


@DEPTHS
def test_samples_beams_and_unusual_rows(make: Maker, depth: int) -> None:
    """In one batch: usual rows, samples that fork, log-probabilities, edits."""
    prompts = workload()
    asked = [params(i, 8 + i) for i in range(len(prompts))]
    asked[1] = SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
    asked[2] = params(2, 9, logprobs=2)
    asked[3] = params(3, 14, repetition_penalty=1.3, presence_penalty=0.2)
    asked[4] = params(4, 5, prompt_logprobs=1)
    asked[5] = params(5, 11, logit_bias={7: 3.0})
    asked[0] = params(3, 14, dry_multiplier=3.0, dry_allowed_length=1, dry_breaker_token_ids=[])
    asked[7] = params(7, 12, xtc_probability=0.5, xtc_threshold=0.02)
    asked[6] = params(6, 11, logits_processors=[lambda _, row: row * 0.5], logprobs=1)
    results = [
        (
            llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False),
            llm.beam_search(
                [{"prompt_token_ids": p} for p in prompts[:2]],
                BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True),
            ),
        )
        for llm in (on_host(make), make(depth=depth))
    ]
    (expected, beams), (got, got_beams) = results
    assert_as_on_host(got, expected)
    assert [each.prompt_logprobs for each in got] == [each.prompt_logprobs for each in expected]
    assert [[s.tokens for s in each.sequences] for each in got_beams] == [
        [s.tokens for s in each.sequences] for each in beams
    ]

"""Output hooks with the bundled model: from Python, in another process, and the examples."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.bundled import bundled_model_path
from quire.hooks import (
    HOLD,
    PASS,
    Answer,
    End,
    OutputHook,
    Pass,
    Replace,
    Unsent,
    WatchedSequence,
)
from quire.protocol import FinishReason
from quire.protocol.status import EngineState
from quire.text.rendering.tokenizer import Tokenizer
from tests.engine.process_harness import (
    Collected,
    ask,
    collect,
    hosted,
    run,
    until_begun,
    until_state,
)

EXAMPLES = Path(__file__).parents[1] / "examples" / "output_hooks"
PROMPTS = ["Once upon a time", "The capital of France is", "1 2 3 4"]
PARAMS = SamplingParams(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True)


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Words:
    """Holds words until they are whole; nothing else changes."""

    def watch(self, sequence: WatchedSequence) -> Words:
        assert sequence.decode(sequence.prompt_token_ids)
        return self

    def judge(self, unsent: Unsent) -> Answer:
        return PASS if unsent.is_last or unsent.text.endswith((" ", ".", "\n")) else HOLD


words = Words()


class NoVowel:
    """Ends an output at the first capital E."""

    def watch(self, sequence: WatchedSequence) -> NoVowel:
        return self

    def judge(self, unsent: Unsent) -> Answer:
        return End("an E", len(unsent.token_ids) - 1) if "E" in unsent.texts[-1] else PASS


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(quiet=True, num_kv_blocks=64, max_model_len=256)


@pytest.fixture(scope="module")
def watched() -> LLM:
    hooks: list[Any] = [
        {"words": words, "no-vowel": NoVowel()},
        "ends=tests.test_output_hooks:Ends",
    ]
    return LLM(quiet=True, num_kv_blocks=64, max_model_len=256, output_hooks=hooks)


class Ends:
    """Puts a word in place of every end, once."""

    def watch(self, sequence: WatchedSequence) -> _Ends:
        return _Ends()


class _Ends:
    def __init__(self) -> None:
        self._is_done = False

    def judge(self, unsent: Unsent) -> Answer:
        if unsent.is_last and not self._is_done:
            self._is_done = True
            return Replace(len(unsent.token_ids) - 1, text=" END")
        return PASS


def texts(llm: LLM, params: SamplingParams) -> list[list[str]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert not any(output.error for output in outputs), outputs
    return [[sample.text for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_what_passes_is_unchanged(plain: LLM, watched: LLM, n: int, logprobs: int | None) -> None:
    """And so is what nobody watches."""
    params = PARAMS.clone(n=n, logprobs=logprobs)
    wanted = plain.generate(PROMPTS, params, use_tqdm=False)
    for hooks in ((), ("words",)):
        found = watched.generate(PROMPTS, params.clone(hooks=hooks), use_tqdm=False)
        for one, other in zip(found, wanted, strict=True):
            for sample, reference in zip(one.outputs, other.outputs, strict=True):
                assert sample.token_ids == reference.token_ids
                assert sample.text == reference.text
                assert sample.logprobs == reference.logprobs


class Rewrites:
    """Holds three tokens, and puts two others in their place when an output has reached lengths."""

    def watch(self, sequence: WatchedSequence) -> _Rewrites:
        return _Rewrites()


class _Rewrites:
    def __init__(self) -> None:
        self.num_sent = 0
        self._lengths = [5, 14, 15, 33]

    def judge(self, unsent: Unsent) -> Answer:
        count = len(unsent.token_ids)
        if unsent.is_last:
            return PASS
        if self._lengths and self.num_sent + count >= self._lengths[0]:
            return Replace(max(count - 3, 0), token_ids=(self._lengths.pop(0), 78))
        num_passed = max(count - 3, 0)
        self.num_sent += num_passed
        return Pass(num_passed)


def rewritten(plain: LLM, prompt: str, params: SamplingParams) -> list[int]:
    """Tokens of an output that is computed anew, as a prompt, after each change."""
    (first,) = plain.generate(prompt, params, use_tqdm=False)
    prompt_ids, tokens, judge = (
        first.prompt_token_ids,
        list(first.outputs[0].token_ids),
        _Rewrites(),
    )
    length = len(tokens)
    at = 0
    while at < length:
        at += 1
        held = tuple(tokens[judge.num_sent : at])
        answer = judge.judge(Unsent(held, ("",) * len(held), at == length))
        if isinstance(answer, Replace):
            kept = tokens[: judge.num_sent + answer.num_kept] + list(answer.token_ids)
            rest = params.clone(max_tokens=length - len(kept))
            again = {"prompt_token_ids": [*prompt_ids, *kept]}
            (output,) = plain.generate(again, rest, use_tqdm=False)  # type: ignore[arg-type]
            tokens, at = [*kept, *output.outputs[0].token_ids], len(kept)
    return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tails_are_replaced_at_any_depth(plain: LLM, depth: int, temperature: float) -> None:
    """Catches tokens of steps in flight that survive a rewind, and rows that go on from K/V of
    tokens which are gone, beside rows that nobody watches."""
    hooks: list[Any] = [{"rewrites": Rewrites()}]
    params = PARAMS.clone(temperature=temperature)
    mixed = [params.clone(hooks=("rewrites",)), params, params.clone(hooks=("rewrites",))]
    with LLM(
        quiet=True, num_kv_blocks=64, max_model_len=256, output_hooks=hooks, depth=depth
    ) as llm:
        found = llm.generate(PROMPTS, mixed, use_tqdm=False)
    assert not any(output.error for output in found), found
    (untouched,) = plain.generate(PROMPTS[1], params, use_tqdm=False)
    assert found[1].outputs[0].token_ids == untouched.outputs[0].token_ids
    for i in (0, 2):
        wanted = rewritten(plain, PROMPTS[i], params)
        assert 33 in wanted
        assert found[i].outputs[0].token_ids == wanted


def test_stop_strings_match_in_what_was_sent(plain: LLM, watched: LLM) -> None:
    params = PARAMS.clone(stop=["the", "a "])
    assert texts(watched, params.clone(hooks=("words",))) == texts(plain, params)


def test_an_end_is_content_filter(plain: LLM, watched: LLM) -> None:
    params = PARAMS.clone(max_tokens=150, hooks=("no-vowel",), n=4, temperature=1.5)
    outputs = watched.generate(PROMPTS, params, use_tqdm=False)
    reasons = {sample.finish_reason for output in outputs for sample in output.outputs}
    assert reasons == {"content_filter", "length"}
    wanted = plain.generate(PROMPTS, params.clone(hooks=()), use_tqdm=False)
    for output, reference in zip(outputs, wanted, strict=True):
        for sample, whole in zip(output.outputs, reference.outputs, strict=True):
            assert "E" not in sample.text
            count = len(sample.token_ids)
            assert whole.token_ids[:count] == sample.token_ids


def test_an_end_may_be_replaced(plain: LLM, watched: LLM) -> None:
    params = PARAMS.clone(max_tokens=12)
    for found, whole in zip(
        texts(watched, params.clone(hooks=("ends",))), texts(plain, params), strict=True
    ):
        assert " E" in found[0]
        assert whole[0].startswith(found[0][: found[0].index(" E")])


def test_a_deny_list_stops_before_the_phrase(plain: LLM) -> None:
    deny_list = example("deny_list")
    wanted = texts(plain, PARAMS)
    phrases = [text[0][len(text[0]) // 2 :][:12].upper() for text in wanted]
    hook = deny_list.DenyList(phrases)
    assert isinstance(hook, OutputHook)
    with LLM(quiet=True, num_kv_blocks=64, max_model_len=256, output_hooks=[hook]) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for output, (whole,), phrase in zip(outputs, wanted, phrases, strict=True):
        (sample,) = output.outputs
        assert sample.finish_reason == "content_filter"
        assert whole.startswith(sample.text)
        assert phrase.lower() not in sample.text.lower()
        rest = whole[len(sample.text) :].lower()
        assert phrase.lower() in rest[: len(phrase) + 12], "more was held than needed"


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_a_deny_list_sees_phrases_across_tokens(step: int) -> None:
    """However the text is cut, no part of a phrase is sent."""
    hook = example("deny_list").DenyList(["internal use only"])
    text = "for inter internal use internal use ONLY now"
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    sent, unsent = "", list[str]()
    for piece in pieces:
        unsent.append(piece)
        answer = hook.judge(Unsent(tuple(range(len(unsent))), tuple(unsent), False))
        if isinstance(answer, End):
            sent += "".join(unsent[: answer.num_kept])
            break
        count = len(unsent) if answer.num_tokens is None else answer.num_tokens
        sent += "".join(unsent[:count])
        del unsent[:count]
    begin = text.index("internal use ONLY")
    assert begin - step < len(sent) <= begin
    assert text.startswith(sent)


def call(tool: str) -> str:
    return f'{{"name": "{tool}", "arguments": {{}}}}'


@pytest.mark.parametrize(
    ("prompt", "output", "wanted"),
    [
        ("buy it", call("pay"), '{"name": "show_cart"'),
        ('{"cart": [1]} buy it', call("pay"), call("pay")),
        ("buy it", call("show_cart"), call("show_cart")),
        ("buy it", "I cannot {pay} now", "I cannot {pay} now"),
        ("buy it", "Well: " + call("refund"), 'Well: {"name": "show_cart"'),
    ],
)
def test_tools_are_allowed_by_state(prompt: str, output: str, wanted: str) -> None:
    """Token by token of the bundled tokenizer."""
    tokenizer = Tokenizer.from_folder(bundled_model_path())

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def decode(token_ids: Any) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    begin = WatchedSequence("1", 0, tuple(encode(prompt)), (), decode, encode)
    hook = example("allowed_tools").shop.watch(begin)
    sent, unsent = list[int](), list[int]()
    tokens = encode(output)
    for i, token in enumerate(tokens):
        unsent.append(token)
        pieces = tuple(tokenizer.token_text(each) for each in unsent)
        answer = hook.judge(Unsent(tuple(unsent), pieces, i + 1 == len(tokens)))
        if isinstance(answer, Replace):
            sent += [*unsent[: answer.num_kept], *encode(answer.text)]
            break
        count = len(unsent) if answer.num_tokens is None else answer.num_tokens
        sent += unsent[:count]
        del unsent[:count]
    assert decode(sent) == wanted


SETTINGS = {
    "model": str(bundled_model_path()),
    "max_model_len": 256,
    "num_kv_blocks": 128,
    "quiet": True,
    "output_hook": "tests.test_output_hooks:words,no-vowel=tests.test_output_hooks:NoVowel",
}


def test_a_core_of_another_process_loads_hooks_and_replays_continue(plain: LLM) -> None:
    prompts = [[5 + i, 17, 301, 42] for i in range(3)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=3, n=2)
    outputs = plain.generate(prompts, params, use_tqdm=False)
    wanted = [{o.index: o.token_ids for o in output.outputs} for output in outputs]
    kind = {"temperature": 0.8, "seed": 3, "n": 2}

    async def work() -> None:
        async with hosted(settings=SETTINGS, max_replays=5) as host:
            founds = [Collected() for _ in prompts]
            streams = [await ask(host.client, p, max_tokens=40, **kind) for p in prompts]
            tasks = [
                asyncio.ensure_future(collect(stream, found))
                for stream, found in zip(streams, founds, strict=True)
            ]
            await until_begun(founds, 2)
            os.kill(host.supervisor.pid, signal.SIGKILL)
            await until_state(host.client, EngineState.RESTARTING)
            assert [(await task).tokens for task in tasks] == wanted
            await until_state(host.client, EngineState.READY)
            ended = await collect(
                await ask(
                    host.client,
                    prompts[0],
                    max_tokens=200,
                    temperature=1.5,
                    n=4,
                    hooks=["no-vowel"],
                ),
                Collected(),
            )
            reasons = {finish.reason for finish in ended.finishes.values()}
            assert FinishReason.CONTENT_FILTER in reasons

    run(work(), 200)


def test_hooks_that_cannot_be_loaded_stop_the_start() -> None:
    from quire.base.errors import ConfigError

    for bad, sentence in (
        ("no_such_module_anywhere:x", "cannot be loaded"),
        ("not a path", "Give package.module:object"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            LLM(quiet=True, output_hook=bad)
    with pytest.raises(ConfigError, match="output_hook_timeout cannot be 0"):
        LLM(quiet=True, output_hook_timeout=0.0)

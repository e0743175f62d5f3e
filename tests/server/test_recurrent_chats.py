"""Chats with a model that has recurrent states, offline and over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.bundled import bundled_model_path
from quire.config.families.reader import read_model_spec
from quire.config.settings import EngineSettings
from quire.engine.model_front import ModelFront, load_model_front
from tests import waiting
from tests.models.families import Case, write_checkpoint
from tests.server.in_memory import RealClient
from tests.server.running import running_server

Message = dict[str, str]
Ask = Callable[[list[Message]], tuple[str, int]]
"""Messages → the answer, and how many tokens of the prompt were cached."""

NUM_SYSTEM = 700
NUM_SHARED = NUM_SYSTEM // 16 * 16
_SIZES = {"vocab_size": 4096, "max_position_embeddings": 4096}
NAMES = ("lfm2", "qwen3_5_text", "granitemoehybrid", "mamba2")
CASES = tuple(Case(name, name, _SIZES) for name in NAMES)
SAMPLING = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the bundled one's tokenizer and template."""
    path: Path = tmp_path_factory.mktemp(request.param.name)
    write_checkpoint(request.param, path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled_model_path() / name, path / name)
    return path


@pytest.fixture(scope="module")
def front(folder: Path) -> ModelFront:
    return load_model_front(EngineSettings(), folder, read_model_spec(folder))


@pytest.fixture(scope="module")
def system(front: ModelFront) -> Message:
    """A message of `NUM_SYSTEM` tokens with those before it and its role."""
    assert front.renderer.tokenizer is not None
    words = " ".join(f"{i} is a number" for i in range(1, 2000))
    ids = front.renderer.tokenizer.encode(words, add_special_tokens=False)
    text = front.renderer.tokenizer.decode(ids[: NUM_SYSTEM - 2])
    message = {"role": "system", "content": text}
    rendered = front.renderer.render_chat([message], add_generation_prompt=False)
    assert NUM_SYSTEM <= len(rendered.token_ids) <= NUM_SYSTEM + 8
    return message


def engine(folder: Path, **settings: object) -> LLM:
    return LLM(
        str(folder), quiet=True, dtype="float32", num_kv_blocks=1024, block_size=16,
        max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=512, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[Callable[[list[Message]], str]]:
    """Answers of an engine that keeps nothing. Conversations repeat: it answers each once."""
    known: dict[str, str] = {}
    with engine(folder, enable_prefix_caching=False) as llm:

        def answer(messages: list[Message]) -> str:
            key = json.dumps(messages)
            if key not in known:
                known[key] = answer_of(llm, messages)[0]
            return known[key]

        yield answer


def answer_of(llm: LLM, messages: list[Message]) -> tuple[str, int]:
    (output,) = llm.chat(messages, SAMPLING, use_tqdm=False)
    assert output.num_cached_tokens is not None
    return output.outputs[0].text, output.num_cached_tokens


@pytest.fixture(params=["offline", "http"])
def make(request: pytest.FixtureRequest, folder: Path, front: ModelFront) -> Iterator[object]:
    """Starts an engine of a depth, and returns what asks it."""
    with ExitStack() as stack:

        def started(depth: int) -> Ask:
            llm = stack.enter_context(engine(folder, depth=depth))
            if request.param == "offline":
                return lambda messages: answer_of(llm, messages)
            server = stack.enter_context(running_server(front, client=RealClient(llm, 2048)))
            http = stack.enter_context(waiting.PatientClient(base_url=server.url))

            def ask(messages: list[Message]) -> tuple[str, int]:
                body = {
                    "messages": messages, "temperature": 0, "max_tokens": SAMPLING.max_tokens,
                    "ignore_eos": True,
                }  # fmt: skip
                response = http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                answer = response.json()
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                return answer["choices"][0]["message"]["content"], cached

            return ask

        yield started


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_turn_computes_the_system_prompt_again(
    make: Callable[[int], Ask], cold: Callable[[list[Message]], str], system: Message, depth: int
) -> None:
    """Also where the last line differs, and where another conversation has the same system
    prompt."""
    ask = make(depth)
    conversation = [system]
    before = 0
    for turn, words in enumerate(("Who are you?", "Go on, and tell me more.", "Why?")):
        for last in (words, f"{words[:-1]}, please, if you can, and take your time!"):
            asked = [*conversation, {"role": "user", "content": last}]
            answer, cached = ask(asked)
            assert answer == cold(asked)
            assert cached >= (NUM_SHARED if before else 0), f"turn {turn}: {last}"
            before += 1
        conversation = [*asked, {"role": "assistant", "content": answer}]
    for words in ("What is the largest number?", "Which ones are even?"):
        asked = [system, {"role": "user", "content": words}]
        answer, cached = ask(asked)
        assert answer == cold(asked)
        assert cached >= NUM_SHARED

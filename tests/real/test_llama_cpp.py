"""Real GGUF files: tokens, chat prompts and greedy answers equal those of llama.cpp.

`make_fixtures` wrote what llama.cpp gives; the files come as `test_real_gguf` says.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.inputs import CONVERSATIONS, texts
from tests.real.packages import gemma3_file, smollm2_file

from quire import LLM, SamplingParams
from quire.text.rendering import Renderer

MIN_GAP = 0.5
MIN_SHARE = 0.75
MAX_WRONG = 0.005
"""llama.cpp rounds activations to 8 bits, which can turn two tokens that are near: seen for 1 of
919 tokens, and 0 of Gemma's."""


class Case:
    def __init__(self, name: str, file: Path) -> None:
        packed = (Path(__file__).parent / "fixtures" / f"{name}.json.gz").read_bytes()
        self.wanted: dict[str, Any] = json.loads(gzip.decompress(packed))
        self.renderer = Renderer.from_folder(file)
        self.llm = LLM(
            str(file), quiet=True, max_model_len=512, num_kv_blocks=512, enable_prefix_caching=False
        )


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    name: str = request.param
    file = smollm2_file() if name == "smollm2" else gemma3_file(tmp_path_factory.mktemp("gemma3"))
    found = Case(name, file)
    yield found
    found.llm.shutdown()


def test_tokens(case: Case) -> None:
    given = texts(case.wanted["special_tokens"])
    tokenizer = case.renderer.tokenizer
    assert tokenizer is not None
    wrong = []
    for text, tokens in zip(given, case.wanted["texts"], strict=True):
        found = tokenizer.encode(text, add_special_tokens=False)
        if found != tokens:
            wrong.append((text, tokens, found))
    assert not wrong, f"{len(wrong)} of {len(given)} texts; the first: {wrong[0]}"


def test_chat_prompts(case: Case) -> None:
    if case.renderer.chat_template is None:
        pytest.skip(f"{case.wanted['file']} has no chat template")
    for messages, prompt in zip(CONVERSATIONS, case.wanted["chats"], strict=True):
        assert case.renderer.render_chat(messages).text == prompt


def test_greedy_answers(case: Case) -> None:
    """quire's best token, after the tokens that llama.cpp chose, is llama.cpp's wherever its two
    best are apart."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    answers = case.wanted["answers"]
    prompts = [{"prompt_token_ids": each["prompt"] + each["tokens"]} for each in answers]
    outputs = case.llm.generate(prompts, params)
    num_clear, wrong = 0, []
    for answer, output in zip(answers, outputs, strict=True):
        start = len(answer["prompt"])
        assert output.prompt_logprobs is not None
        for i, (token, gap) in enumerate(zip(answer["tokens"], answer["gaps"], strict=True)):
            if gap <= MIN_GAP:
                continue
            num_clear += 1
            ranks = output.prompt_logprobs[start + i]
            assert ranks is not None
            if ranks[token].rank != 1:
                wrong.append((answer["prompt"], i, token, gap, ranks))
    assert len(wrong) <= MAX_WRONG * num_clear, f"{len(wrong)} of {num_clear}; {wrong[0]}"
    assert num_clear >= MIN_SHARE * sum(len(each["tokens"]) for each in answers)

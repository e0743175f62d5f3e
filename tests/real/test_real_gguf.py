"""Real GGUF files equal `transformers` with the same weights.

The files come with packages of requirements-real.txt (`make test-real`).
"""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.harness import PagedModel, new_ops
from tests.profiles import machine_settings
from tests.real.greedy import most_probable
from tests.real.inputs import QUESTIONS
from tests.real.packages import gemma3_file, smollm2_file

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.compute.quantization import PlainFormat
from quire.compute.quantization.gguf import GGUFReader
from quire.config import MatrixShape, read_checkpoint, read_model_spec
from quire.config.gguf import config_of, read_gguf_parts
from quire.text.rendering import Renderer

TOKENS = [1, 504, 3575, 282, 4649, 314, 2, 7042, 198, 1036] * 4


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return smollm2_file()


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = gemma3_file(tmp_path_factory.mktemp("gemma3"))
    yield file
    file.unlink()


class WidenedFormats:
    """`MatrixFormats` that keep the numbers of quantized matrices, in the model's dtype."""

    def choose(self, shape: MatrixShape) -> PlainFormat:
        del shape
        chosen = PlainFormat(new_ops("best"))
        chosen.keeps_stored = False
        return chosen


def _transformers_model(file: Path) -> Any:
    """The numbers of the file in float32."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    raw = config_of(read_gguf_parts(file))
    skipped = ("architectures", "model_type", "rope_scaling")
    values = {key: value for key, value in raw._data.items() if raw.has(key) and key not in skipped}
    config = CONFIG_MAPPING[raw.read(str, "model_type")](**values)
    config._attn_implementation = "eager"
    reader = GGUFReader(file)
    weights = {
        name: reader.numbers(info.gguf).reshape(info.shape)
        for name, info in read_checkpoint(file).tensors.items()
        if info.gguf is not None
    }
    with no_init_weights():  # which takes longer than to load them
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = model.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def smollm2_of_transformers(smollm2: Path) -> Any:
    return _transformers_model(smollm2)


def _assert_equals_transformers(file: Path, model: Any) -> None:
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    spec = replace(read_model_spec(file), dtype="float32")
    found = PagedModel(file, "best", 64, formats=WidenedFormats(), spec=spec).step({0: TOKENS})[0]
    assert float((found - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())


def test_smollm2_equals_transformers(smollm2: Path, smollm2_of_transformers: Any) -> None:
    _assert_equals_transformers(smollm2, smollm2_of_transformers)


def test_activations_of_16_bits_give_the_tokens_of_transformers(
    smollm2: Path, smollm2_of_transformers: Any
) -> None:
    """32 greedy tokens of ten questions, in one batch, from integers that stay in memory.
    `benchmarks/quality/first_tokens.py` measures what 8 bits change."""
    settings = {"activation_bits": 16, "dtype": "float32", "max_model_len": 256}
    with LLM(str(smollm2), quiet=True, num_kv_blocks=256, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(chats, params)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 32
        assert most_probable(smollm2_of_transformers, output) == output.outputs[0].token_ids, (
            question
        )


def test_gemma3_equals_transformers(gemma3: Path) -> None:
    _assert_equals_transformers(gemma3, _transformers_model(gemma3))


def test_smollm2_answers(smollm2: Path) -> None:
    with LLM(str(smollm2), quiet=True, max_model_len=256, num_kv_blocks=64) as llm:
        message = {"role": "user", "content": "Complete: the capital of France is"}
        (output,) = llm.chat([message], SamplingParams(temperature=0, max_tokens=16))
        assert output.outputs[0].text == "The capital of France is Paris."


def test_the_question_of_the_docs_has_a_clear_answer(smollm2: Path) -> None:
    """Catches a near-tie among an answer's first tokens, where any rounding may lead a small model
    into nonsense that goes on to the end of the context."""
    questions: set[str] = set()
    chat = r'"content": "([^"]+)"\}\](?:,\s+|\nanswer = llm.chat\(question, )SamplingParams\((.*)\)'
    for page in ("quickstart", "offline"):
        text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
        match = re.search(chat, text)
        assert match is not None and "temperature=0," in match[2]
        questions.add(match[1])
    options = {"quiet": True, "max_model_len": 256, "num_kv_blocks": 64, "dtype": "float32"}
    with LLM(str(smollm2), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=100, logprobs=2)
        chats = [[{"role": "user", "content": question}] for question in questions]
        outputs = llm.chat(chats, params)
    for output in outputs:
        (answer,) = output.outputs
        assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        for entry in answer.logprobs[:20]:
            first, second = sorted((each.logprob for each in entry.values()), reverse=True)[:2]
            assert first - second >= 0.3


LOAD = """
import json, sys
from pathlib import Path
from quire import LLM

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

with LLM(sys.argv[1], quiet=True, max_model_len=256, num_kv_blocks=64):
    print(json.dumps({"peak": kib("VmHWM:") << 10, "after": kib("VmRSS:") << 10}))
"""


def test_peak_memory_of_loading_is_within_the_plan(smollm2: Path) -> None:
    """Catches a model that is in memory twice, or in float32, while it loads."""
    arguments = ["--max-model-len", "256", "--num-kv-blocks", "64", "--json"]
    plan = _child("-m", "quire", "plan", str(smollm2), *arguments)["memory"]
    loaded = _child("-c", LOAD, str(smollm2))
    assert loaded["peak"] <= plan["total"]
    assert loaded["peak"] - loaded["after"] <= 128 << 20


def _child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


NUM_CASES: int = machine_settings(500).max_examples
"""10,000 under `make soak`."""
EXTREMES = [struct.pack("<Q", number) for number in (0, 1, 1 << 31, 1 << 63, (1 << 64) - 1)]


def test_changed_bytes_of_a_real_file(smollm2: Path, tmp_path: Path) -> None:
    """A header with a wrong byte, or a wrong number of 8 bytes, is read or refused in a sentence.
    Half of the changes are among tokens and merges, half among everything else."""
    size = min(info.start for info in read_checkpoint(smollm2).tensors.values())
    with smollm2.open("rb") as opened:
        header = opened.read(size)
    arrays = read_gguf_parts(smollm2).arrays.values()
    first, last = min(array.start for array in arrays), max(array.start for array in arrays)
    file = tmp_path / "changed.gguf"
    with file.open("wb") as out:
        out.write(header)
        out.truncate(smollm2.stat().st_size)  # zeros that take no room
    draw, num_refused = random.Random(30), 0
    for case in range(NUM_CASES):
        place = draw.randrange(size) if case % 2 else draw.randrange(size - last + first)
        place += (last - first) * (case % 2 == 0 and place >= first)
        new = draw.choice(EXTREMES) if draw.random() < 0.3 else draw.randbytes(1)
        new = new[: size - place]
        with file.open("r+b") as out:
            out.seek(place)
            out.write(new)
            out.flush()
            num_refused += _is_refused(file, with_tokenizer=case % 20 == 0)
            out.seek(place)
            out.write(header[place : place + len(new)])
    assert 0 < num_refused < NUM_CASES
    assert file.read_bytes()[:size] == header
    assert not _is_refused(file, with_tokenizer=True)


def _is_refused(file: Path, with_tokenizer: bool) -> bool:
    try:
        read_model_spec(file)
        read_checkpoint(file)
        if with_tokenizer:
            Renderer.from_folder(file)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000
        return True
    return False

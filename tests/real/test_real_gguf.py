"""Real GGUF files equal `transformers` with the same weights.

The files come with packages of requirements-real.txt (`make test-real`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models import harness
from tests.models.harness import PagedModel
from tests.real.packages import gemma3_file, smollm2_file

from quire import LLM, SamplingParams
from quire.config import MatrixShape, read_checkpoint, read_model_spec
from quire.config.gguf import config_of, read_gguf_parts
from quire.quantization import PlainFormat
from quire.quantization.gguf import GGUFReader

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
        chosen = PlainFormat(harness.new_ops("best"))
        chosen.keeps_stored = False
        return chosen


def _assert_equals_transformers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    monkeypatch.setattr(
        harness, "read_model_spec", lambda path: replace(read_model_spec(path), dtype="float32")
    )
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
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = model.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    found = PagedModel(file, "best", 64, formats=WidenedFormats()).step({0: TOKENS})[0]
    assert float((found - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())


def test_smollm2_equals_transformers(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _assert_equals_transformers(smollm2, monkeypatch)


def test_gemma3_equals_transformers(gemma3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _assert_equals_transformers(gemma3, monkeypatch)


def test_smollm2_answers(smollm2: Path) -> None:
    with LLM(str(smollm2), quiet=True, max_model_len=256, num_kv_blocks=64) as llm:
        message = {"role": "user", "content": "What is the capital of France?"}
        (output,) = llm.chat([message], SamplingParams(temperature=0, max_tokens=16))
        assert output.outputs[0].text == "The capital of France is Paris."


def test_changed_bytes_of_a_real_file(smollm2: Path, tmp_path: Path) -> None:
    """A header with a wrong byte is read or refused in a sentence; see tests/profiles.py for more
    of them."""
    from tests.profiles import machine_settings

    from quire.errors import ConfigError

    size = min(info.start for info in read_checkpoint(smollm2).tensors.values())
    with smollm2.open("rb") as opened:
        header = bytearray(opened.read(size))
    file = tmp_path / "changed.gguf"
    with file.open("wb") as out:
        out.write(header)
        out.truncate(smollm2.stat().st_size)  # zeros that take no room
    num_cases: int = machine_settings(100).max_examples
    for case in range(num_cases):
        digest = hashlib.blake2b(str(case).encode(), digest_size=8).digest()
        place, byte = int.from_bytes(digest[:6], "little") % size, digest[7]
        with file.open("r+b") as out:
            out.seek(place)
            out.write(bytes((byte,)))
            out.flush()
            try:
                read_model_spec(file)
                read_checkpoint(file)
            except ConfigError as error:
                assert "\n" not in str(error)
            out.seek(place)
            out.write(header[place : place + 1])

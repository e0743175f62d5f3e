"""A GGUF file is a model like a folder: `LLM` needs nothing beside it."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.bundled import bundled_model_path
from tests.gguf_tokenizer import tokenizer_metadata
from tests.gguf_writer import gguf_metadata, gguf_tensors, write_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["import os\n", "def add(a, b):\n    return"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, its weights in float32."""
    folder, bundled = tmp_path_factory.mktemp("bundled"), bundled_model_path()
    config = SimpleNamespace(**json.loads((bundled / "config.json").read_text()))
    weights = load_file(bundled / "model.safetensors")
    save_file({name: w.float() for name, w in weights.items()}, folder / "model.safetensors")
    metadata = gguf_metadata("llama", config) | {
        "llama.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.eot_token_id": 9,  # of generation_config.json
        **tokenizer_metadata(bundled),
    }
    return write_gguf(folder / "model.gguf", metadata, gguf_tensors(folder, "llama", config))


def _answers(model: str | None, quantization: str | None) -> list[list[int]]:
    with LLM(
        model,
        quiet=True,
        dtype="float32",
        num_kv_blocks=64,
        max_model_len=256,
        quantization=quantization,
    ) as llm:
        ids = [llm.get_tokenizer().encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
        found = [output.outputs[0].token_ids for output in llm.generate(ids, GREEDY)]
        chat = llm.chat([{"role": "user", "content": "How do I sort a list?"}], GREEDY)
        return [*ids, *found, chat[0].prompt_token_ids, chat[0].outputs[0].token_ids]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tokens_and_answers_are_those_of_the_folder(file: Path, quantization: str | None) -> None:
    assert _answers(str(file), quantization) == _answers(None, quantization)


def test_only_some_rows_are_in_float32_at_a_time(file: Path) -> None:
    """Slices of rows together are the whole tensor."""
    from quire.compute.quantization.gguf import GGUFReader, reader
    from quire.config import read_checkpoint

    info = read_checkpoint(file).tensors["model.layers.0.self_attn.q_proj.weight"]
    assert info.gguf is not None
    opened, layout = GGUFReader(file), info.gguf
    whole = opened.numbers(layout)
    assert torch.equal(whole[7:19], opened.numbers(layout, 7, 19))
    first, rows = next(iter(opened.slices(layout)))
    assert (first, len(rows)) == (0, min(256, reader.SLICE_NUMBERS // 256))
    folder = load_file(bundled_model_path() / "model.safetensors")
    assert torch.equal(whole, folder["model.layers.0.self_attn.q_proj.weight"].float())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells the pages held")
def test_a_tensor_that_was_loaded_holds_no_memory(file: Path) -> None:
    """The pages of the file leave this process, and a later read finds the same bytes."""
    from quire.compute.quantization.gguf import GGUFReader
    from quire.config import read_checkpoint

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE

    layout = read_checkpoint(file).tensors["model.embed_tokens.weight"].gguf
    assert layout is not None
    size = layout.entry.end - layout.entry.start
    opened, before = GGUFReader(file), held()
    copied = opened.blocks(layout).clone()
    assert held() - before > size // 2
    opened.release(layout)
    assert held() - before < size // 2
    assert torch.equal(opened.blocks(layout), copied)

"""`quire convert`: a written folder loads as the one that was read, with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.bundled import bundled_model_path
from quire.config import read_checkpoint, read_model_spec
from quire.config.quantization import rotation_of, shared_rotation
from quire.config.sentence import read_sentence_settings
from quire.engine.convert import convert_model
from quire.entrypoints.cli.main import main
from tests.encoder_writer import write_sentence_files
from tests.gguf_tokenizer import tokenizer_metadata
from tests.gguf_writer import gguf_metadata, gguf_tensors, write_gguf
from tests.models.families import Case, write_checkpoint
from tests.models.harness import PagedModel
from tests.packed_writer import CONFIG, FORMATS, all_but_head, write_pair

SEQUENCES = {0: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 1: [8], 2: [9, 7, 9, 3, 2]}
BY_NAME = {each.name: each for each in FORMATS}


def logits(folder: Path, quantization: str | None = None) -> dict[int, torch.Tensor]:
    return PagedModel(folder, "reference", 32, quantization).step(SEQUENCES)


def in_bfloat16(folder: Path) -> Path:
    """The same folder, which says that it is bfloat16."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": "bfloat16"}
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config))
    return folder


CASES = (
    Case("llama", "llama", {"hidden_size": 64, "intermediate_size": 160}),
    Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True, "hidden_size": 64}),
    Case("gpt2", "gpt2"),
    Case("opt-350m", "opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    Case("gemma3", "gemma3_text", {"query_pre_attn_scalar": 24}),
    Case("mpt", "mpt"),
)
ALL_FORMATS = [
    (case, quantization)
    for case in CASES
    for quantization in (None, "int8", "int4", "int4-g64-sym")
]
MORE_CASES = (
    Case("mixtral", "mixtral", {"hidden_size": 64}),
    Case("qwen3-moe", "qwen3_moe", {"hidden_size": 64}),
    Case("gpt-oss", "gpt_oss", {"hidden_size": 64}),
    Case("glm", "glm", {"hidden_size": 64, "attention_bias": True}),
    Case("glm4", "glm4", {"hidden_size": 64}),
    Case("cohere", "cohere", {"hidden_size": 64}),
    Case("gpt-neox", "gpt_neox", {"hidden_size": 64}),
)
"""Experts, and outputs that are in another order on disk."""
MORE_FORMATS = [(case, name) for case in MORE_CASES for name in ("int8", "int4")]


def _name(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("case", "quantization"), ALL_FORMATS + MORE_FORMATS, ids=_name)
def test_converted_is_quantized_at_load(
    case: Case, quantization: str | None, tmp_path: Path
) -> None:
    """To the bit: q, k, v that are merged at load, tied tables, transposed and odd sizes, and what
    a format cannot hold."""
    source, out = tmp_path / "source", tmp_path / "out"
    write_checkpoint(case, source)
    write_sentence_files(source, mode="mean", longest=40)
    convert_model(source, out, quantization)
    assert read_sentence_settings(out, is_encoder=False).pooling == "mean"
    wanted = logits(in_bfloat16(source), quantization)
    found = logits(out)
    assert all(torch.equal(found[seq], wanted[seq]) for seq in SEQUENCES)
    dtypes = {tensor.dtype for tensor in read_checkpoint(out).tensors.values()}
    # Norms that are stored less 1, and sinks of attention, which the model holds in float32.
    exact = {"F32"} if case.name in ("gemma3", "gpt-oss") else set[str]()
    assert dtypes <= {"BF16", "compressed-tensors"} | exact


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["awq-gemm-g32", "fp8-blocks", "nf4"])
def test_quantized_folders_convert(name: str, quantization: str | None, tmp_path: Path) -> None:
    chosen = BY_NAME[name]
    packed, plain, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    convert_model(packed, tmp_path / "out", quantization)
    wanted, found = logits(in_bfloat16(plain), quantization), logits(tmp_path / "out")
    assert all(torch.equal(found[seq], wanted[seq]) for seq in SEQUENCES)


def test_the_bundled_model_and_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command converts; all that is no weight comes along."""
    source, out = bundled_model_path(), tmp_path / "out"
    assert main(["convert", str(source), str(out), "--quantization", "int4"]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    modes = {path.stat().st_mode for path in out.iterdir() if path.suffix != ".jinja"}
    assert len(modes) == 1
    found, wanted = logits(out), logits(source, "int4")
    assert all(torch.equal(found[seq], wanted[seq]) for seq in SEQUENCES)
    assert main(["convert", str(source), str(out)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_other_engines_read_it(tmp_path: Path) -> None:
    """The words and names of compressed-tensors, as its own documentation has them."""
    source = write_pair(tmp_path, None, lambda _: None)[1]
    for quantization, layout in (("int8", "int-quantized"), ("int4", "pack-quantized")):
        out = tmp_path / quantization
        convert_model(source, out, quantization, plain_head=True)
        settings = json.loads((out / "config.json").read_text())["quantization_config"]
        assert settings["format"] == layout
        assert settings["ignore"] == ["lm_head"]
        [group] = settings["config_groups"].values()
        assert group["targets"] == ["Linear"]
        tensors = load_file(out / "model.safetensors")
        module = "model.layers.0.mlp.up_proj."
        kinds = {name.removeprefix(module) for name in tensors if name.startswith(module)}
        assert tensors["lm_head.weight"].dtype == torch.bfloat16
        if quantization == "int8":
            assert kinds == {"weight", "weight_scale"}
            assert tensors[module + "weight_scale"].shape == (128, 1)
            assert group["input_activations"]["strategy"] == "token"
        else:
            assert kinds == {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"}
            assert tensors[module + "weight_packed"].shape == (128, 16)
            assert tensors[module + "weight_zero_point"].shape == (16, 4)


def test_rotations_are_named_by_module(tmp_path: Path) -> None:
    """Rotations have the form of compressed-tensors. Older versions wrote none, which others read:
    then activations are rounded without one."""
    source = write_pair(tmp_path, None, lambda _: None)[1]
    found: dict[bool, dict[int, torch.Tensor]] = {}
    for rotate in (True, False):
        out = tmp_path / str(rotate)
        convert_model(source, out, "int8", rotate=rotate)
        settings = json.loads((out / "config.json").read_text())["quantization_config"]
        transforms = (settings["transform_config"] or {"config_groups": {}})["config_groups"]
        sizes: dict[str, int] = {}
        for group in transforms.values():
            for side, location in zip(group["apply"], ("input", "weight_input"), strict=True):
                assert (side["location"], side["inverse"]) == (location, location != "input")
                sizes |= dict.fromkeys(side["targets"], group["head_dim"])
        spec = read_model_spec(source)
        expected = {"lm_head": rotation_of("int8", spec.hidden_size)}
        for layer in range(spec.num_layers):
            prefix = f"model.layers.{layer}."
            shared = shared_rotation("int8", spec.num_heads * spec.head_dim, spec.head_dim)
            expected[f"{prefix}self_attn.o_proj"] = shared
            down = read_checkpoint(source).tensors[f"{prefix}mlp.down_proj.weight"].shape[1]
            expected[f"{prefix}mlp.down_proj"] = shared_rotation("int8", down, 1)
            for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
                expected[f"{prefix}{name}_proj"] = rotation_of("int8", spec.hidden_size)
        assert sizes == (
            {name: size for name, size in expected.items() if size > 1} if rotate else {}
        )
        found[rotate] = logits(out)
    wanted = logits(in_bfloat16(source), "int8")
    assert all(torch.equal(found[True][seq], wanted[seq]) for seq in SEQUENCES)
    assert not any(torch.equal(found[False][seq], wanted[seq]) for seq in SEQUENCES)
    exact = logits(in_bfloat16(source))
    for seq in SEQUENCES:
        torch.testing.assert_close(found[False][seq], exact[seq], rtol=0.1, atol=0.3)


def test_large_models_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_pair(tmp_path, None, lambda _: None)[1]
    monkeypatch.setattr("quire.compute.models.convert.SHARD_BYTES", 100_000)
    out = tmp_path / "out"
    convert_model(source, out)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    wanted = logits(in_bfloat16(source))
    assert all(torch.equal(found, wanted[seq]) for seq, found in logits(out).items())


def test_nothing_stays_of_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches half a folder that looks like a whole one."""
    source = write_pair(tmp_path, None, lambda _: None)[1]
    config = CONFIG | {"intermediate_size": 96}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"\[96, 128\]"):
        convert_model(source, tmp_path / "out", "int8")
    with pytest.raises(ConfigError, match="quantization cannot be 'int5'"):
        convert_model(source, tmp_path / "out", "int5")
    for out in (source / "out", source / "deeper" / "out"):
        with pytest.raises(ConfigError, match="lies within"):
            convert_model(source, out)
    (source / "config.json").write_text(json.dumps(CONFIG))

    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("quire.compute.models.convert.save_file", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        convert_model(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "plain"]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_gguf_converts(quantization: str | None, tmp_path: Path) -> None:
    """With its tokenizer and template, which are in the file."""
    bundled = bundled_model_path()
    config = SimpleNamespace(**json.loads((bundled / "config.json").read_text()))
    metadata = gguf_metadata("llama", config) | {
        "llama.rope.freq_base": config.rope_theta,
        **tokenizer_metadata(bundled),
    }
    weights = load_file(bundled / "model.safetensors")
    wide = {name: tensor.float() for name, tensor in weights.items()}
    save_file(wide, tmp_path / "model.safetensors")
    tensors = gguf_tensors(tmp_path, "llama", config)
    file = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    out = tmp_path / "out"
    convert_model(file, out, quantization)
    stored = load_file(out / "model.safetensors")
    assert quantization or all(torch.equal(stored[name], weights[name]) for name in weights)
    messages = [{"role": "user", "content": "How do I sort a list?  "}]
    greedy = SamplingParams(temperature=0, max_tokens=2)
    answers: list[list[int]] = []
    for model, more in ((file, {"quantization": quantization}), (out, {})):
        with LLM(str(model), quiet=True, dtype="bfloat16", num_kv_blocks=32, **more) as llm:
            chat = llm.chat(messages, greedy, use_tqdm=False)[0]
            answers.append([*chat.prompt_token_ids, *chat.outputs[0].token_ids])
    assert answers[0] == answers[1]

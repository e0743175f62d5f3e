"""Facts about quantized folders before anything is loaded, and folders that are refused."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quire.base.errors import ConfigError
from quire.config import read_checkpoint, read_model_spec
from quire.config.hf import DTYPE_BITS
from quire.config.memory.plan import weight_bytes
from quire.config.model_spec import DTYPE_BYTES
from quire.config.packed.compressed_tensors.scheme import BY_TOKEN
from tests.packed_writer import (
    FORMATS,
    Format,
    all_but_head,
    gptq,
    pack_quantized,
    stored_matrix,
    write_pair,
)
from tests.profiles import examples

BY_NAME = {each.name: each for each in FORMATS}
MODULE = "model.layers.0.mlp.down_proj"


def folder_of(name: str, path: Path) -> Path:
    chosen: Format = BY_NAME[name]
    return write_pair(path, chosen.settings, all_but_head(chosen.write))[0]


def rotation(location: str = "input", **changes: Any) -> dict[str, Any]:
    """A transform_config that quire reads, but for `changes` and where it says of inputs."""
    sides = (
        {"location": location, "inverse": False},
        {"location": "weight_input", "inverse": True},
    )
    group = {"type": "hadamard", "head_dim": 32, "randomize": False} | changes
    group["apply"] = [{"targets": ["Linear"], **side} for side in sides]
    return {"config_groups": {"a": group}}


def change_settings(folder: Path, **changes: Any) -> None:
    """`...` takes a key away."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    settings = config["quantization_config"] | changes
    config["quantization_config"] = {k: v for k, v in settings.items() if v is not ...}
    path.write_text(json.dumps(config))


def change_tensor(folder: Path, kind: str, tensor: torch.Tensor | None) -> None:
    """Replace a tensor of one module; None removes it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{MODULE}.{kind}"]
    if tensor is not None:
        tensors[f"{MODULE}.{kind}"] = tensor
    save_file(tensors, file, {"format": "pt"})


SETTINGS = [
    ("awq-gemm-g32", {"quant_method": "quip"}, "quant_method='quip' is not supported.*awq, .*gptq"),
    ("awq-gemm-g32", {"quant_method": ...}, "quant_method='not stated' is not supported"),
    ("awq-gemm-g32", {"quant_method": 4}, "quant_method=4 must be of type str"),
    ("awq-gemm-g32", {"bits": 8}, "bits=8 is not supported; AWQ has 4 bits"),
    ("awq-gemm-g32", {"version": "marlin"}, "version='marlin' is not supported.*'gemm' or 'gemv'"),
    ("awq-gemm-g32", {"group_size": 0}, "group_size=0 is not supported"),
    ("gptq-4", {"bits": 5}, "bits=5 is not supported; GPTQ has 2, 3, 4, 8"),
    ("gptq-4", {"bits": ...}, "key 'bits' is missing"),
    ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
    ("gptq-4", {"dynamic": {"+:[": {"bits": 8}}}, r"'\[' is no regular expression"),
    ("gptq-4", {"dynamic": {"+:.*": {"bits": 16}}}, "bits=16 is not supported"),
    ("fp8-blocks", {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
    ("fp8-blocks", {"weight_block_size": [128]}, r"weight_block_size=\[128\] is not supported"),
    ("modelopt", {"quant_algo": "NVFP4"}, "quant_algo='NVFP4' is not supported.*FP8"),
    ("gptq-4", {"checkpoint_format": ..., "format": "bitblas"}, "format='bitblas' is not"),
    ("squeezellm-3", {"wbits": 2}, "wbits=2 is not supported"),
    ("compressed-w4a16", {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not"),
    ("compressed-w4a16", {"format": "marlin-24"}, "'marlin-24' is not supported"),
    ("compressed-w4a16", {"config_groups": {}}, "no weights are described"),
    (
        "compressed-w4a16",
        {"config_groups": {"a": {"format": "pack-quantized", "weights": {"group_size": 0}}}},
        "group_size=0 is not supported",
    ),
    ("compressed-w4a16", {"transform_config": {"config_groups": {"R1": 1}}}, "transform_config"),
    (
        "compressed-w4a16",
        {"transform_config": rotation(type="random-hadamard")},
        "transform_config",
    ),
    ("compressed-w4a16", {"transform_config": rotation(head_dim=24)}, "transform_config"),
    ("compressed-w4a16", {"transform_config": rotation(randomize=True)}, "transform_config"),
    ("compressed-w4a16", {"transform_config": rotation(location="output")}, "transform_config"),
    ("compressed-w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
]


@pytest.mark.parametrize(("name", "changes", "message"), SETTINGS)
def test_settings_that_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Catches a format that is read as another one, or dies without saying why."""
    folder = folder_of(name, tmp_path)
    change_settings(folder, **changes)
    with pytest.raises(ConfigError, match=message) as error:
        read_model_spec(folder)
    assert "config.json" in str(error.value)


LAYOUTS = [
    ("awq-gemm-g32", "scales", None, "'model.layers.0.mlp.down_proj.scales' is missing"),
    ("awq-gemm-g32", "qzeros", None, r"down_proj.qzeros' is missing"),
    ("awq-gemm-g32", "qweight", torch.zeros(128, dtype=torch.int32), "asks for two dimensions"),
    ("awq-gemm-g32", "qweight", torch.zeros(0, 16, dtype=torch.int32), "asks for two dimensions"),
    ("awq-gemm-g32", "qweight", torch.zeros(128, 16), "dtype F32, but.*I32"),
    ("awq-gemm-g32", "scales", torch.zeros(8, 128).half(), r"shape \[8, 128\].* \[4, 128\]"),
    ("awq-gemv-g32", "qzeros", torch.zeros(128, 1, dtype=torch.int32), r"\[128, 4\]"),
    ("gptq-4", "qzeros", None, "qzeros' is missing"),
    ("gptq-4", "qweight", torch.zeros(16, 127, dtype=torch.int32), "whole words of 4-bit"),
    ("gptq-3", "qweight", torch.zeros(13, 128, dtype=torch.int32), "whole words of 3-bit"),
    ("gptq-4", "g_idx", torch.zeros(64, dtype=torch.int32), r"shape \[128\]"),
    ("fp8-blocks", "weight_scale_inv", None, "weight_scale' is missing"),
    ("fp8-blocks", "weight_scale_inv", torch.ones(128, 1), r"asks for shape \[1, 1\]"),
    ("fp8-outputs", "weight_scale", torch.ones(127, 1), r"asks for shape \[128, 1\]"),
    ("fp8-outputs", "weight", torch.zeros(128, 128).to(torch.float8_e5m2), "F8_E5M2, but.*E4M3"),
    ("compressed-w4a16", "weight_shape", torch.tensor([128, 120]), r"4 bits of shape \[128, 120\]"),
    ("compressed-w4a16", "weight_shape", torch.tensor([128, -8]), "at least 1, not -8"),
    ("compressed-w4a16-asym", "weight_zero_point", None, "weight_zero_point' is missing"),
    ("compressed-w8a8", "weight_scale", torch.ones(3), r"asks for shape \[128, 1\]"),
    ("compressed-mxfp4", "weight_scale", torch.zeros(128, 5).byte(), r"shape \[128, 4\]"),
    ("mxfp4-blocks", "weight_blocks", torch.zeros(128, 64).byte(), "inputs / 32, 16"),
    ("nf4", "weight", torch.zeros(100, 1).byte(), "4 bits for each of 128 × 128 numbers"),
    ("nf4", "weight.quant_map", torch.zeros(15), r"shape \[16\]"),
    ("nf4-nested", "weight.nested_absmax", None, "nested_absmax' is missing"),
    ("int8-bnb", "SCB", torch.zeros(1), r"shape \[128\]"),
    ("int8-bnb", "weight_format", torch.tensor(2).byte(), "asks for 0, which is rows"),
    ("squeezellm-3", "lookup_table", torch.zeros(128, 16), r"shape \[128, 8\]"),
    ("squeezellm-4-sparse", "cols", None, "cols' is missing"),
    ("squeezellm-4-sparse", "rows", torch.zeros(4).int(), r"shape \[129\]"),
]


@pytest.mark.parametrize(("name", "kind", "tensor", "message"), LAYOUTS)
def test_layouts_that_are_refused(
    name: str, kind: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    """Headers alone decide, before a weight is read."""
    folder = folder_of(name, tmp_path)
    change_tensor(folder, kind, tensor)
    with pytest.raises(ConfigError, match=message) as error:
        read_checkpoint(folder)
    assert "model.safetensors" in str(error.value)


STATES = [
    b"",
    b"[]",
    b'{"shape": [128, 128]}',
    b'{"shape": [128, 128], "blocksize": 0}',
    b'{"shape": [16384], "blocksize": 64}',
    b'{"shape": [-128, -128], "blocksize": 64}',
    b'{"shape": [128, 1e400], "blocksize": 64}',
    b'{"shape": [128, 128], "blocksize": 64, "nested_blocksize": 256, "nested_offset": NaN}',
    b"\xff{",
    b'{"shape": [128, 128], "blocksize": 64, "junk": ' + b"[" * 50_000,
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: str(state[:70]))
def test_states_that_are_refused(state: bytes, tmp_path: Path) -> None:
    folder = folder_of("nf4", tmp_path)
    stored = torch.from_numpy(np.frombuffer(state, np.uint8).copy())
    change_tensor(folder, "weight.quant_state.bitsandbytes__nf4", stored)
    with pytest.raises(ConfigError, match="bitsandbytes__nf4' has shape"):
        read_checkpoint(folder)


NAN = torch.full((4, 128), torch.nan).half()
VALUES = [
    ("awq-gemm-g32", "scales", NAN, "scales' holds numbers that are not finite"),
    ("gptq-4", "g_idx", torch.full((128,), 4).int(), "g_idx' holds 4, which is not in 0 to 3"),
    ("gptq-4", "g_idx", torch.full((128,), -1).int(), "holds -1"),
    (
        "fp8-outputs",
        "weight",
        torch.full((128, 128), 127, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight' holds numbers that are not finite",
    ),
    ("compressed-mxfp4", "weight_scale", torch.full((128, 4), 255).byte(), "holds 255"),
    ("compressed-w4a8", "weight", torch.full((128, 128), 8).to(torch.int8), "holds 8, which"),
    ("compressed-w4a16-act-order", "weight_g_idx", torch.full((128,), 9).int(), "holds 9"),
    ("nf4", "weight.absmax", torch.full((256,), torch.inf), "not finite"),
    ("squeezellm-4-sparse", "rows", torch.arange(129).flip(0).int(), "out of order"),
    ("squeezellm-4-sparse", "full_row_indices", torch.tensor([1, 2, 128]).int(), "holds 128"),
]


@pytest.mark.parametrize(("name", "kind", "tensor", "message"), VALUES)
def test_values_that_are_refused(
    name: str, kind: str, tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    """Catches an index out of bounds, and a model that answers NaN."""
    folder = folder_of(name, tmp_path)
    change_tensor(folder, kind, tensor)
    layout = read_checkpoint(folder).tensors[f"{MODULE}.weight"].packed
    assert layout is not None
    with pytest.raises(ConfigError, match=message) as error:
        stored_matrix(layout)
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("awq-gemm-g32", 4 + 16 / 32 + 4 / 32),
        ("awq-gemm-g128", 4 + 16 / 128 + 4 / 128),
        ("gptq-4-sym", 4 + 16 / 128),
        ("gptq-8-sym", 8),
        ("compressed-w8a8", 8),
        ("fp8-blocks", 8 + 32 / 128),
        ("gptq-2", 2 + 16 / 32 + 2 / 32),
        ("gptq-3", 3 + 16 / 32 + 3 / 32),
        ("compressed-mxfp4", 4 + 8 / 32),
        ("nf4", 4 + 32 / 64),
        ("squeezellm-3", 3 + 8 * 32 / 128),
    ],
)
def test_the_plan_counts_bits_from_headers(name: str, bits: float, tmp_path: Path) -> None:
    """Catches a plan of 16 bits for a model in 4, or of a matrix that is counted twice. What is
    allowed are a few words for each output or matrix."""
    folder = folder_of(name, tmp_path)
    spec, checkpoint = read_model_spec(folder), read_checkpoint(folder)
    packed = [info for info in checkpoint.tensors.values() if info.packed is not None]
    numbers = sum(info.num_elements for info in packed)
    plain = sum(info.num_elements for info in checkpoint.tensors.values()) - numbers
    found = weight_bytes(spec, checkpoint) - plain * DTYPE_BYTES[spec.dtype]
    outputs = sum(info.shape[0] for info in packed)
    assert numbers * bits / 8 <= found <= numbers * bits / 8 + outputs * 4 + len(packed) * 1024
    assert checkpoint.num_bytes < (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("name", "kernel", "bits"),
    [
        ("awq-gemm-g128", "int4-g128", 4 + 16 / 128 + 4 / 128),
        ("gptq-3", "int4", 4 + 16 / 32 + 4 / 32),
        ("fp8-blocks", None, 8 + 32 / 128 / 128),
        ("nf4", None, 4 + 32 / 64),
        ("compressed-mxfp4", None, 4 + 8 / 32),
    ],
)
def test_the_plan_counts_what_a_gpu_keeps(
    name: str, kernel: str | None, bits: float, tmp_path: Path
) -> None:
    """Catches a plan of the CPU's kernels for a device that has others or none."""
    folder = folder_of(name, tmp_path)
    spec, checkpoint = read_model_spec(folder), read_checkpoint(folder)
    assert {layout.kernel_on("cuda") for layout in checkpoint.packed} == {kernel}
    packed = [info for info in checkpoint.tensors.values() if info.packed is not None]
    numbers = sum(info.num_elements for info in packed)
    plain = sum(info.num_elements for info in checkpoint.tensors.values()) - numbers
    found = weight_bytes(spec, checkpoint, device="cuda") - plain * DTYPE_BYTES[spec.dtype]
    outputs = sum(info.shape[0] for info in packed)
    assert numbers * bits / 8 <= found <= numbers * bits / 8 + outputs * 4 + len(packed) * 1024


def test_a_widened_model_is_planned_as_one(tmp_path: Path) -> None:
    """With `quantization` matrices are made anew from the numbers."""
    _, plain, _ = write_pair(tmp_path, None, lambda _: None)
    chosen = BY_NAME["fp8-blocks"]
    packed = write_pair(tmp_path / "x", chosen.settings, all_but_head(chosen.write))[0]
    spec = read_model_spec(packed)
    for quantization in ("int8", "int4"):
        wanted = weight_bytes(spec, read_checkpoint(plain), quantization)
        assert weight_bytes(spec, read_checkpoint(packed), quantization) == wanted


def test_old_files_beside_config_json(tmp_path: Path) -> None:
    """AutoGPTQ's quantize_config.json, AutoAWQ's quant_config.json and ModelOpt's file."""
    for name, file, settings in (
        ("gptq-4", "quantize_config.json", {"bits": 4, "group_size": 32, "sym": False}),
        ("awq-gemm-g32", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
        ("modelopt", "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
    ):
        folder = folder_of(name, tmp_path / name)
        wanted = read_checkpoint(folder)
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        (folder / file).write_text(json.dumps(settings))
        assert read_checkpoint(folder).tensors.keys() == wanted.tensors.keys()


def test_folders_of_auto_round(tmp_path: Path) -> None:
    """Their matrices are those of GPTQ or AWQ, under another name."""
    for name, packings in {
        "gptq-4": ("auto_round:auto_gptq", "auto_round:gptq", None),
        "gptq-2-v2": ("auto_round:gptqmodel", "auto_round"),
        "awq-gemm-g32": ("auto_round:auto_awq", "auto_round:awq"),
    }.items():
        folder = folder_of(name, tmp_path / name)
        wanted = read_checkpoint(folder).packed
        assert wanted
        config = json.loads((folder / "config.json").read_text())
        stated = config["quantization_config"]
        kept = {key: stated[key] for key in ("bits", "group_size", "sym") if key in stated}
        for packing in packings:
            settings = {
                **kept, "quant_method": "auto-round", "packing_format": packing,
                "data_type": "int", "act_bits": None, "iters": 200, "autoround_version": "0.5.1",
                "block_name_to_quantize": "model.layers",
                "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}},
            }  # fmt: skip
            if packing is None:  # as its first versions
                settings |= {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}
            config["quantization_config"] = settings
            (folder / "config.json").write_text(json.dumps(config))
            assert read_checkpoint(folder).packed == wanted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "'auto_round:llm_compressor'"),
        ({"packing_format": "auto_round:fp8_static"}, "'auto_round:fp8_static'"),
        ({"data_type": "mx_fp"}, "data_type='mx_fp'"),
        ({"act_bits": 8}, "act_bits=8"),
        ({"extra_config": {"lm_head": {"data_type": "nv_fp"}}}, "data_type='nv_fp'"),
        ({"bits": 5}, "bits=5"),
    ],
)
def test_other_packings_of_auto_round_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    folder = folder_of("gptq-4", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"quant_method": "auto-round", **settings}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_checkpoint(folder)


def test_settings_of_modules(tmp_path: Path) -> None:
    """GPTQ's `dynamic` and several groups of compressed-tensors."""
    wide = gptq(8, 64)
    usual = gptq(4, 32)
    settings = {
        **BY_NAME["gptq-4"].settings,
        "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": 64}, "-:.*o_proj": {}},
    }
    folder = write_pair(
        tmp_path / "gptq",
        settings,
        lambda name: (
            None if name.endswith(("o_proj", "head")) else wide if "down" in name else usual
        ),
    )[0]
    tensors = read_checkpoint(folder).tensors
    kernels = {name: info.packed and info.packed.kernel_on("cpu") for name, info in tensors.items()}
    assert kernels["model.layers.1.mlp.down_proj.weight"] == "blocks-w8_zero-64"
    assert kernels["model.layers.1.mlp.up_proj.weight"] == "blocks-w4_zero-32"
    assert tensors["model.layers.1.self_attn.o_proj.weight"].packed is None
    config = json.loads((folder / "config.json").read_text())
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    for keys in (names, [r".*\.down_proj"], ["down_proj$"]):
        own = {key: {"bits": 8, "group_size": 64} for key in keys}
        more = {"quant_method": "auto-round", "dynamic": None, "extra_config": own}
        whole = {**config, "quantization_config": {**config["quantization_config"], **more}}
        (folder / "config.json").write_text(json.dumps(whole))
        found = read_checkpoint(folder).tensors
        assert {name: info.packed and info.packed.scheme for name, info in found.items()} == {
            name: info.packed and info.packed.scheme for name, info in tensors.items()
        }

    groups = {
        "a": {
            "targets": ["re:.*self_attn.*", "model.layers.0.mlp.up_proj"],
            "weights": {"num_bits": 8, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
        },
        "b": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}},
    }
    settings = {**BY_NAME["compressed-w4a16"].settings, "config_groups": groups}
    eight, four = pack_quantized(8, -1), pack_quantized(4, 32)
    folder = write_pair(
        tmp_path / "compressed",
        settings,
        lambda name: eight if "self_attn" in name or name.endswith("0.mlp.up_proj") else four,
    )[0]
    head, up = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
    kernels = kernels_of(folder)
    assert kernels["model.layers.1.self_attn.q_proj.weight"] == "int8"
    assert kernels["model.layers.0.mlp.up_proj.weight"] == "int8"
    assert kernels[up] == kernels[head] == "blocks-w4-32"
    change_settings(folder, **{BY_TOKEN: True})
    kernels = kernels_of(folder)
    assert kernels[up] == kernels[head] == "int4-sym"
    groups["a"]["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token"}
    change_settings(folder, config_groups=groups, **{BY_TOKEN: ...})
    assert kernels_of(folder)["model.layers.1.self_attn.q_proj.weight"].startswith("blocks-w8")


def kernels_of(folder: Path) -> dict[str, str | None]:
    tensors = read_checkpoint(folder).tensors
    return {name: info.packed.kernel_on("cpu") for name, info in tensors.items() if info.packed}


def test_scales_of_a_cache_are_no_weights(tmp_path: Path) -> None:
    """Catches a checkpoint that is refused for scales that a 16-bit cache does without."""
    folder = folder_of("fp8-outputs", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = (
        "self_attn.k_scale",
        "self_attn.kv_scale",
        "self_attn.k_proj.kv_scale",
        "self_attn.k_proj.v_scale",
        "self_attn.v_proj.output_scale",
    )
    for name in names:
        tensors[f"model.layers.0.{name}"] = torch.ones(1)
    save_file(tensors, file, {"format": "pt"})
    assert not any(name.endswith("scale") for name in read_checkpoint(folder).tensors)


def test_a_plain_folder_with_quantized_tensors_says_so(tmp_path: Path) -> None:
    """Without settings nobody knows what the bits mean."""
    folder = folder_of("awq-gemm-g32", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"down_proj.qweight'.*no quantization_config"):
        read_checkpoint(folder)


ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 200),
    st.floats(),
    st.sampled_from(["", "gptq", "gemv", "e4m3", "int-quantized", "(((", "re:(", "group", "\x00"]),
    st.lists(st.integers(-1, 129), max_size=3),
    st.dictionaries(st.sampled_from(["a", "weights", "+:.*"]), st.integers(), max_size=2),
)
KEYS = (
    "quant_method", "bits", "w_bit", "wbits", "group_size", "version", "sym", "desc_act", "dynamic",
    "checkpoint_format", "weight_block_size", "fmt", "quant_algo", "format", "config_groups",
    "load_in_4bit", "sparsity_config", "transform_config",
)  # fmt: skip
GROUP_KEYS = ("num_bits", "type", "strategy", "group_size", "symmetric", "block_structure")


@examples(300)
@given(st.data())
def test_any_settings_and_shapes_end_in_a_sentence(data: st.DataObject) -> None:
    """Catches a traceback, or memory for what a header claims: no tensor is read here."""
    chosen = BY_NAME[data.draw(st.sampled_from(sorted(BY_NAME)))]
    settings: dict[str, Any] = json.loads(json.dumps(chosen.settings))
    settings |= data.draw(st.dictionaries(st.sampled_from(KEYS), ODD, max_size=2))
    groups = settings.get("config_groups")
    if isinstance(groups, dict) and "group_0" in groups:
        own = data.draw(st.dictionaries(st.sampled_from(GROUP_KEYS), ODD, max_size=2))
        groups["group_0"]["weights"] |= own
        groups["group_0"] |= data.draw(st.dictionaries(st.just("targets"), ODD, max_size=1))
    tensors = chosen.write(64, 128, np.random.default_rng(1))[0]
    entries, position, body = {}, 0, b""
    for kind, tensor in tensors.items():
        dtype, shape = _SPELLED[tensor.dtype], list(tensor.shape)
        if data.draw(st.integers(0, 4)) == 0:
            dtype = data.draw(st.sampled_from(sorted(set(_SPELLED.values()))))
            shape = data.draw(st.lists(st.integers(0, 130), max_size=3))
        size = int(np.prod(shape)) * DTYPE_BITS[dtype] // 8
        entries[f"m.{kind}"] = {
            "dtype": dtype, "shape": shape, "data_offsets": [position, position + size]
        }  # fmt: skip
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        body += raw[:size].ljust(size, b"\0")
        position += size
    header = json.dumps(entries).encode()
    with TemporaryDirectory() as name:
        folder = Path(name)
        text = struct.pack("<Q", len(header)) + header + body
        (folder / "model.safetensors").write_bytes(text)
        (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
        try:
            tensor = read_checkpoint(folder).tensors.get("m.weight")
            if tensor is not None and tensor.packed is not None:
                assert stored_matrix(tensor.packed).numbers().shape == tensor.shape
        except ConfigError as error:
            assert len(str(error)) < 2000


_SPELLED = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def test_spellings_of_other_versions(tmp_path: Path) -> None:
    """Keys that tools have renamed."""
    folder = folder_of("gptq-4-v2", tmp_path / "gptq")
    change_settings(folder, checkpoint_format=..., format="gptq_v2")
    assert read_checkpoint(folder).tensors[f"{MODULE}.weight"].packed is not None
    chosen = BY_NAME["compressed-fp8-blocks"]
    settings = json.loads(json.dumps(chosen.settings))
    settings["config_groups"]["group_0"]["weights"]["block_structure"] = "32x48"
    folder = write_pair(tmp_path / "blocks", settings, all_but_head(chosen.write))[0]
    assert read_checkpoint(folder).tensors[f"{MODULE}.weight"].packed is not None

"""Weight files are found, measured and refused from their headers alone."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.config import find_weight_files, read_checkpoint, read_model_spec

INDEX = "model.safetensors.index.json"


def write_file(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """tensors: name to dtype, shape, bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_single_file(tmp_path: Path) -> None:
    """Catches offsets that forget the header, and sizes counted in elements."""
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": ("BF16", [2, 3], 12), "b": ("F32", [], 4)})
    checkpoint = read_checkpoint(tmp_path)
    a, b = checkpoint.tensors["a"], checkpoint.tensors["b"]
    assert (a.shape, a.dtype, a.num_bytes, a.file) == ((2, 3), "BF16", 12, path)
    assert (b.shape, b.start, b.end) == ((), a.end, path.stat().st_size)
    assert checkpoint.num_bytes == 16


def test_shards_and_second_copies(tmp_path: Path) -> None:
    """Catches reading Mistral's `consolidated` copy, or a stray file, beside the shards."""
    write_file(tmp_path / "m-1.safetensors", {"a": ("F16", [1], 2)})
    write_file(tmp_path / "m-2.safetensors", {"b": ("F16", [1], 2)})
    write_file(tmp_path / "consolidated.safetensors", {"a": ("F16", [1], 2)})
    assert set(read_checkpoint(tmp_path).tensors) == {"a", "b"}
    write_index(tmp_path, {"b": "m-2.safetensors"})
    assert [path.name for path in find_weight_files(tmp_path)] == ["m-2.safetensors"]
    assert set(read_checkpoint(tmp_path).tensors) == {"b"}


def test_missing_shard(tmp_path: Path) -> None:
    """Catches a half-finished download that fails deep in the loader."""
    write_index(tmp_path, {"a": "m-1.safetensors"})
    with pytest.raises(ConfigError, match=r"m-1\.safetensors: missing"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}},
        {"weight_map": {"a": "model.safetensors", "c": "model.safetensors"}},
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {}},
        [],
    ],
    ids=str,
)
def test_a_stale_index_beside_the_one_file(tmp_path: Path, index: Any) -> None:
    """Fault: a model that was merged into one file does not load, though all of it is there."""
    write_file(tmp_path / "model.safetensors", {"a": ("F16", [1], 2), "b": ("F16", [1], 2)})
    (tmp_path / INDEX).write_text(json.dumps(index))
    found = read_checkpoint(tmp_path)
    assert set(found.tensors) == {"a", "b"}
    (note,) = found.left_out
    assert "model.safetensors is read" in note and f"{INDEX} is left out: " in note


def test_of_two_whole_copies_the_one_file_is_read(tmp_path: Path) -> None:
    for name in ("m-1", "model"):
        write_file(tmp_path / f"{name}.safetensors", {"a": ("F16", [1], 2)})
    write_index(tmp_path, {"a": "m-1.safetensors"})
    assert find_weight_files(tmp_path) == (tmp_path / "model.safetensors",)
    write_file(tmp_path / "m-1.safetensors", {"a": ("F16", [1], 2), "b": ("F16", [1], 2)})
    write_index(tmp_path, {"a": "m-1.safetensors", "b": "m-1.safetensors"})
    found = read_checkpoint(tmp_path)
    assert found.files == (tmp_path / "m-1.safetensors",) and not found.left_out
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    found = read_checkpoint(tmp_path)
    assert found.files == (tmp_path / "m-1.safetensors",) and "broken" in found.left_out[0]
    (tmp_path / "model.safetensors").write_bytes(whole)
    write_index(tmp_path, {"a": "model.safetensors", "b": "m-1.safetensors"})
    assert read_checkpoint(tmp_path).tensors["a"].file.name == "model.safetensors"


def test_what_trainers_leave_beside_weights_is_none(tmp_path: Path) -> None:
    """Fault: an adapter that lies beside the shards is read as one."""
    write_file(tmp_path / "adapter_model.safetensors", {"lora": ("F16", [1], 2)})
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors alone, which is no model"):
        read_checkpoint(tmp_path)
    write_file(tmp_path / "m-1.safetensors", {"a": ("F16", [1], 2)})
    found = read_checkpoint(tmp_path)
    assert set(found.tensors) == {"a"} and "adapter_model.safetensors" in found.left_out[0]


def test_index_that_leaves_the_folder(tmp_path: Path) -> None:
    """Catches an index that makes the engine read files elsewhere on the machine."""
    write_index(tmp_path, {"a": "../secret.safetensors"})
    with pytest.raises(ConfigError, match=r"expected a .* file of the folder"):
        read_checkpoint(tmp_path)


def test_index_names_an_absent_tensor(tmp_path: Path) -> None:
    """Catches an index and shards of different versions."""
    write_file(tmp_path / "m-1.safetensors", {"a": ("F16", [1], 2)})
    write_index(tmp_path, {"a": "m-1.safetensors", "b": "m-1.safetensors"})
    with pytest.raises(ConfigError, match="tensor 'b' is not in m-1"):
        read_checkpoint(tmp_path)


def test_tensor_given_twice(tmp_path: Path) -> None:
    """Catches two models mixed in one folder."""
    for name in ("x", "y"):
        write_file(tmp_path / f"{name}.safetensors", {"a": ("F16", [1], 2)})
    with pytest.raises(ConfigError, match=r"'a' is in x\.safetensors and in y\.safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 30])
def test_cut_off_header(tmp_path: Path, keep: int) -> None:
    """Catches a struct or JSON error in place of a sentence."""
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": ("F32", [8], 32)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors: broken"):
        read_checkpoint(tmp_path)


def test_cut_off_body(tmp_path: Path) -> None:
    """Catches a bus error at load: a mapped file shorter than its header says."""
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": ("F32", [8], 32)})
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=f"expected {whole} bytes, found {whole - 5} bytes"):
        read_checkpoint(tmp_path)


MALFORMED = [
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}},
    {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
    {"a": {"dtype": "F32", "shape": [1]}},
    {"a": {"dtype": "F32", "shape": [math.inf], "data_offsets": [0, 4]}},
    {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, math.inf]}},
    {"a": {"dtype": "F32", "shape": [1], "data_offsets": [math.nan, 4]}},
    {"a": 3},
    [],
]


@pytest.mark.parametrize("header", MALFORMED)
def test_malformed_header(tmp_path: Path, header: Any) -> None:
    """Catches a header that is believed: sizes come from a file that anyone may have made."""
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(ConfigError, match=r"model\.safetensors: broken"):
        read_checkpoint(tmp_path)


def test_pickled_weights_only(tmp_path: Path) -> None:
    """Catches "file not found" where the user needs to know that .bin must be converted."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*convert"):
        find_weight_files(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    """Catches an empty folder loaded as a model without tensors."""
    with pytest.raises(ConfigError, match=r"no .*safetensors file"):
        find_weight_files(tmp_path)


def test_dtype_from_the_weights(tmp_path: Path) -> None:
    """Catches float32 assumed when config.json does not state a dtype."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"a": ("BF16", [4], 8), "b": ("F32", [1], 4)}
    write_file(tmp_path / "model.safetensors", tensors)
    assert read_model_spec(tmp_path).dtype == "bfloat16"

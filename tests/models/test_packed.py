"""Quantized folders give the logits of the numbers that an independent writer packed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import Case, write_checkpoint
from tests.models.harness import PagedModel, new_factory, new_ops
from tests.models.ranks import on_ranks
from tests.packed_writer import (
    FORMATS,
    HIDDEN,
    VOCAB,
    Format,
    all_but_head,
    float8,
    gptq,
    stored_matrix,
    write_pair,
)

from quire.base.errors import ConfigError
from quire.compute.models import check_replacements, load_model
from quire.compute.quantization import MatrixFormats, PlainFormat, WeightFormat
from quire.compute.quantization.packed import keep
from quire.compute.quantization.packed.keep import form_of
from quire.compute.quantization.weight_format import WidensStored
from quire.compute.worker.weight_stash import reachable_tensors
from quire.config import MatrixShape, read_checkpoint, read_model_spec
from quire.config.memory.plan import weight_bytes
from quire.config.packed.block_kinds import BlockFormat
from quire.config.shard import Shard
from quire.ops import REFERENCE
from quire.ops.distributed import Collectives
from quire.ops.linear.blocks.contract import quantize_groups
from quire.ops.linear.int8.activations import quantize_rows
from quire.ops.linear.plain import PackedMatrix
from quire.ops.linear.plain.reference import PlainMatrix

SEQUENCES = {0: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 1: [8], 2: [9, 7, 9, 3, 2]}
FORMATS_BY_NAME = {each.name: each for each in FORMATS}


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_numbers_are_those_that_were_packed(name: str, tmp_path: Path) -> None:
    """Catches a field, a zero point or a scale in the wrong place, in what is stored and in what
    the kernel of the format makes of it."""
    chosen = FORMATS_BY_NAME[name]
    folder, _, numbers = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    tensors = read_checkpoint(folder).tensors
    for module, wanted in numbers.items():
        layout = tensors[f"{module}.weight"].packed
        assert layout is not None
        assert kind_of(layout.kernel_on("cpu")) == kind_of(chosen.kernel)
        stored = stored_matrix(layout)
        assert torch.equal(stored.numbers(), wanted)
        assert torch.equal(stored.numbers(37, 50), wanted[37:50])
        matrix = keep(new_ops("reference"), (stored,), None, torch.float32).matrix
        ids = torch.tensor([0, 5, 31, 5])
        assert torch.equal(matrix.rows(ids), wanted[ids])
        x = torch.randn(3, wanted.shape[1])
        own_order = chosen.name.endswith("act-order")
        rounded = x if own_order or not rounds(chosen) else rounded_by(chosen.kernel, x)
        product, atol = rounded @ wanted.t(), 0.05 if own_order else 1e-4
        torch.testing.assert_close(matrix(x), product, rtol=0, atol=atol)


def kind_of(kernel: str | None) -> str | None:
    """A kernel without the size of its blocks, which may be all inputs."""
    if kernel is None or kernel.startswith("tables"):
        return kernel and kernel[: len("tables-8")]
    blocks = BlockFormat.named(kernel)
    return kernel if blocks is None else blocks.kind.name


def rounds(chosen: Format) -> bool:
    """Return true if activations have 8 bits."""
    return chosen.kernel is not None and not chosen.kernel.startswith("tables")


def rounded_by(kernel: str | None, x: torch.Tensor) -> torch.Tensor:
    """x [T, I] as a kernel for integers takes it."""
    assert kernel is not None
    blocks = BlockFormat.named(kernel)
    if blocks is None:
        rounded, scale = quantize_rows(x)
        return rounded * scale
    rounded, scale = quantize_groups(x, blocks.kind.group_size)
    return (rounded * scale).flatten(1)


class RoundsActivations:
    """`MatrixFormats` over plain weights with the 8-bit activations of a kernel. head: whether the
    projection to logits has them too."""

    def __init__(self, kernel: str, *, head: bool) -> None:
        self._kernel, self._head = kernel, head
        self._plain = PlainFormat(new_ops("reference"))

    def choose(self, shape: MatrixShape) -> WeightFormat:
        plain = shape.is_head and not self._head
        return self._plain if plain else RoundedFormat(self._kernel)


class RoundedFormat(WidensStored):
    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        matrix = RoundedMatrix(weight, bias, gate=gate)
        matrix.kernel = self._kernel
        return matrix


class RoundedMatrix(PlainMatrix):
    kernel: str

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().__call__(rounded_by(self.kernel, x), out_dtype)


def run(
    folder: Path, chunks: tuple[int, ...] = (64,), formats: MatrixFormats | None = None
) -> dict[int, torch.Tensor]:
    """Logits of all tokens, fed by so many of a sequence at a time."""
    model = PagedModel(folder, "reference", 64, formats=formats)
    found: dict[int, list[torch.Tensor]] = {seq: [] for seq in SEQUENCES}
    left = {seq: list(tokens) for seq, tokens in SEQUENCES.items()}
    sizes = list(chunks)
    while left:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        step = {seq: tokens[:size] for seq, tokens in left.items()}
        for seq, logits in model.step(step).items():
            found[seq].append(logits)
        left = {seq: tokens[size:] for seq, tokens in left.items() if len(tokens) > size}
    return {seq: torch.cat(pieces) for seq, pieces in found.items()}


def close(found: Mapping[int, torch.Tensor], wanted: Mapping[int, torch.Tensor], by: float) -> None:
    for seq, logits in wanted.items():
        torch.testing.assert_close(found[seq], logits, rtol=0, atol=by)


def rounding(chosen: Format, *, head: bool = False) -> RoundsActivations | None:
    """Return the rounding of activations for a format; None if it rounds none."""
    return RoundsActivations(str(chosen.kernel), head=head) if rounds(chosen) else None


def tolerance(chosen: Format) -> float:
    """One activation may be rounded the other way after sums in another order, and all of them in
    groups of another order of inputs."""
    if chosen.name.startswith("gptq") and chosen.name.endswith("act-order"):
        return 0.25
    return 0.05 if rounds(chosen) else 1e-4


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_logits_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    """Prefill as a whole, in chunks, and tokens one by one. Catches parts of a merged layer in
    the wrong order, and biases that are lost."""
    chosen: Format = FORMATS_BY_NAME[name]
    packed, plain, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    wanted = run(plain, formats=rounding(chosen))
    assert max(float(logits.std()) for logits in wanted.values()) > 0.3
    found = run(packed)
    close(found, wanted, tolerance(chosen))
    close(run(packed, (4, 3, 1)), found, tolerance(chosen))


def test_parts_of_a_merged_layer_may_differ(tmp_path: Path) -> None:
    """Plain beside packed, other groups, other orders of inputs, other kernels; shards that cut a
    matrix. Catches a merge of what does not fit, and outputs in the wrong order."""
    act = [gptq(4, 32, act_order=seed) for seed in (1, 2)]
    writers = {
        "q_proj": gptq(4, 32),
        "k_proj": gptq(8, 32),
        "v_proj": None,
        "gate_proj": act[0],
        "up_proj": act[1],
        "lm_head": gptq(4, 32),
    }
    settings = {
        **FORMATS_BY_NAME["gptq-4"].settings,
        "dynamic": {r"+:.*layers\.\d+\.self_attn\.k_proj": {"bits": 8}},
    }
    packed, plain, _ = write_pair(
        tmp_path, settings, lambda name: writers.get(name.split(".")[-1], gptq(4, 32))
    )
    shard(packed)
    close(run(packed), run(plain), 0.25)
    close(run(packed, (4, 3, 1)), run(packed), 0.05)
    exact = {name: w for name, w in writers.items() if name in ("k_proj", "v_proj")}
    packed, plain, _ = write_pair(
        tmp_path / "exact",
        settings,
        lambda name: exact.get(name.split(".")[-1]),
    )
    close(run(packed), run(plain), 0.05)


def shard(folder: Path) -> None:
    """Two files, each with every other tensor, so that parts of one matrix are in both."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    weight_map = {}
    for index in (0, 1):
        own = names[index::2]
        save_file({name: tensors[name] for name in own}, folder / f"m-{index}.safetensors")
        weight_map |= dict.fromkeys(own, f"m-{index}.safetensors")
    file.unlink()
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["awq-gemm-g32", "compressed-w8a8", "nf4", "gptq-4-act-order"])
def test_a_head_that_is_quantized(name: str, tmp_path: Path) -> None:
    """Also beside an embedding that config.json ties it to: the stored one wins."""
    chosen = FORMATS_BY_NAME[name]
    packed, plain, _ = write_pair(tmp_path, chosen.settings, lambda _: chosen.write)
    wanted = run(plain, formats=rounding(chosen, head=True))
    close(run(packed), wanted, tolerance(chosen))
    for folder in (packed, plain):
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
    close(run(packed), wanted, tolerance(chosen))


@pytest.mark.parametrize("name", ["awq-gemm-g32", "int8-bnb", "fp8-blocks", "gptq-4-act-order"])
def test_a_table_that_is_quantized(name: str, tmp_path: Path) -> None:
    """An embedding is widened as it loads; one that is the head too stays as it is."""
    chosen = FORMATS_BY_NAME[name]
    for tied in (False, True):
        path = tmp_path / str(tied)
        packed, plain, _ = write_pair(
            path, chosen.settings, lambda _: None, {"tie_word_embeddings": tied}
        )
        tensors, numbers = chosen.write(VOCAB, HIDDEN, np.random.default_rng(3))
        for folder in (packed, plain):
            file = folder / "model.safetensors"
            stored = load_file(file)
            del stored["model.embed_tokens.weight"]
            own = tensors if folder == packed else {"weight": numbers}
            stored |= {f"model.embed_tokens.{kind}": part for kind, part in own.items()}
            save_file({k: v.contiguous() for k, v in stored.items()}, file)
        logits = run(plain)
        close(run(packed), logits, 0.05 if tied and rounds(chosen) else 1e-4)


@pytest.mark.parametrize("name", ["awq-gemm-g32", "fp8-outputs", "gptq-4-act-order"])
def test_a_cache_in_8_bits_does_without_biases(name: str, tmp_path: Path) -> None:
    """Turns red when the biases of a packed projection stay in an int8 cache, or get lost."""
    chosen = FORMATS_BY_NAME[name]
    packed, plain, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    for folder in (packed, plain):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for key in tensors:
            if key.endswith("k_proj.bias"):
                tensors[key][5] += 300.0
        save_file(tensors, file)
    wanted = PagedModel(plain, "reference", 64, kv_dtype="int8").step(SEQUENCES)
    found = PagedModel(packed, "reference", 64, kv_dtype="int8").step(SEQUENCES)
    close(found, wanted, 0.3 if rounds(chosen) else 0.02)
    close(found, run(packed), 0.5)


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-g128-sym"])
@pytest.mark.parametrize("name", ["fp8-blocks", "awq-gemm-g32", "nf4-nested"])
def test_bits_of_its_own(name: str, quantization: str, tmp_path: Path) -> None:
    """`quantization` makes the same of a quantized folder as of its numbers."""
    chosen = FORMATS_BY_NAME[name]
    packed, plain, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    found = PagedModel(packed, "reference", 64, quantization).step(SEQUENCES)
    wanted = PagedModel(plain, "reference", 64, quantization).step(SEQUENCES)
    assert all(torch.equal(found[seq], wanted[seq]) for seq in SEQUENCES)


@pytest.mark.parametrize(
    "name",
    ["awq-gemm-g128", "gptq-4-sym", "compressed-w8a8", "int8-bnb", "fp8-blocks", "nf4-nested"],
)
def test_kernels_give_the_bits_of_the_reference(name: str, tmp_path: Path) -> None:
    """One matrix is computed, whose parts are merged and gated."""
    chosen = FORMATS_BY_NAME[name]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    tensors = read_checkpoint(folder).tensors
    parts = []
    for part in ("gate", "up"):
        layout = tensors[f"model.layers.0.mlp.{part}_proj.weight"].packed
        assert layout is not None
        parts.append(stored_matrix(layout))
    x = torch.randn(9, HIDDEN)
    for gate in (None, "silu"):
        best, plain = (
            keep(new_ops(kind), parts, torch.randn(256, generator=torch.manual_seed(1)), x.dtype,
                 gate=gate).matrix(x)
            for kind in ("best", "reference")
        )  # fmt: skip
        # Blocks add their groups in another order than the reference.
        is_exact = gate is None and str(parts[0].kernel).startswith("int")
        torch.testing.assert_close(best, plain, rtol=0, atol=0 if is_exact else 2e-5)


@pytest.mark.parametrize(
    "name",
    ["awq-gemm-g32", "gptq-4-act-order", "compressed-w8a8", "compressed-w4a16-asym",
     "compressed-w4a16-act-order", "fp8-blocks", "nf4", "squeezellm-4-sparse"],
)  # fmt: skip
def test_ranks_keep_their_part_packed(name: str, tmp_path: Path) -> None:
    """Two ranks together give what the whole model gives. Turns red when a rank widens its part,
    and when scales, orders of inputs or largest activations are not those of its share."""
    chosen, settings = FORMATS_BY_NAME[name], {**FORMATS_BY_NAME[name].settings}
    write = chosen.write
    if name == "fp8-blocks":  # so small that two ranks can share them
        settings |= {"weight_block_size": [64, 64]}
        write = float8("blocks", "weight_scale_inv", (64, 64))
    folder, _, _ = write_pair(tmp_path, settings, all_but_head(write))
    whole = PagedModel(folder, "best", 64).step(SEQUENCES)
    matrices: list[object] = []

    def work(shard: Shard, collectives: Collectives) -> dict[int, torch.Tensor]:
        paged = PagedModel(folder, "best", 64, shard=shard, collectives=collectives)
        for block in paged.model.blocks:
            layers = (block.qkv, block.output, block.mlp.gate_up, block.mlp.down)
            matrices.extend(layer.weights.matrix for layer in layers)
        return paged.step(SEQUENCES)

    for found in on_ranks(2, work):
        close(found, whole, tolerance(chosen))
    # Plain weights are float32 here, so that a matrix with any is a widened one.
    for matrix in matrices:
        wide = [t for t in reachable_tensors(matrix) if t.dtype == torch.float32 and t.dim() == 2]
        assert not any(min(t.shape) >= 64 for t in wide)


def test_a_share_within_a_group_is_refused(tmp_path: Path) -> None:
    """Blocks of 48 inputs by ranks of 64. Turns red when a rank takes scales of other inputs."""
    chosen = FORMATS_BY_NAME["compressed-fp8-blocks"]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    with pytest.raises(ConfigError, match=r"in the format fp8 cannot be cut.*multiples of"):
        on_ranks(
            2,
            lambda shard, collectives: PagedModel(
                folder, "reference", 64, shard=shard, collectives=collectives
            ),
        )


def test_a_wrong_model_is_refused_by_its_shapes(tmp_path: Path) -> None:
    chosen = FORMATS_BY_NAME["awq-gemm-g32"]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 96}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"gate_proj.weight' has shape \[128, 128\].*\[96, 128\]"):
        PagedModel(folder, "reference", 64)


def test_made_up_weights_are_plain(tmp_path: Path) -> None:
    """load_format="dummy" reads no weight file."""
    chosen = FORMATS_BY_NAME["awq-gemm-g32"]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    (folder / "model.safetensors").unlink()
    spec = read_model_spec(folder)
    load_model(spec, folder, new_factory(spec), "dummy", progress=False)


@pytest.mark.parametrize("kind", ["reference", "best"])
@pytest.mark.parametrize("name", ["fp8-blocks", "nf4", "squeezellm-4-sparse"])
def test_what_is_widened_stays_packed(name: str, kind: str, tmp_path: Path) -> None:
    """Catches a model that keeps its numbers in 32 bits beside their bits, or the files mapped, and
    a plan of other bytes. The reference keeps tensors as stored, as a GPU does; kernels have a
    table and some words for each matrix more or less."""
    chosen = FORMATS_BY_NAME[name]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    model = PagedModel(folder, kind, 64)
    model.step(SEQUENCES)
    attention = model.model.blocks[0].attention
    tables = {table.untyped_storage().data_ptr() for table in reachable_tensors(attention)}
    found = {
        tensor.data_ptr(): tensor.nbytes
        for tensor in reachable_tensors(model.model)
        if tensor.untyped_storage().data_ptr() not in tables
    }
    checkpoint, size = read_checkpoint(folder), sum(found.values())
    if kind == "reference" or new_ops("best").chosen["linear_tables"] == REFERENCE:
        assert size == weight_bytes(model.spec, checkpoint, device="cuda")
    else:
        few = 1200 * len(checkpoint.packed)
        assert abs(size - weight_bytes(model.spec, checkpoint)) < few


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_a_gpu_keeps_integers(name: str, tmp_path: Path) -> None:
    """GPUs take the kernels for integers that have equal weights, since they have none for blocks
    and tables. Catches AWQ and GPTQ widened step by step there, and other weights than stored."""
    chosen = FORMATS_BY_NAME[name]
    folder, _, numbers = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    module = "model.layers.1.mlp.down_proj"
    layout = read_checkpoint(folder).tensors[f"{module}.weight"].packed
    assert layout is not None
    kernel = layout.kernel_on("cuda")
    if kernel is None:
        assert name.startswith(("fp8", "nf4", "fp4", "squeeze", "modelopt", *NOT_ON_GPUS))
        return
    assert kernel.startswith("int")
    form = form_of(stored_matrix(layout).defined(), kernel)
    assert form is not None
    matrix = form.pack(new_ops("reference"), None, torch.float32, None)
    assert torch.equal(matrix.rows(torch.arange(HIDDEN)), numbers[module])


NOT_ON_GPUS = (
    "awq-gemm-g16", "compressed-fp8", "compressed-mxfp4", "compressed-w8a16-groups",
    "compressed-w8a8-asym", "compressed-w8a8-groups", "gptq-8", "gptq-8-v2-uneven", "mxfp4",
)  # fmt: skip


def test_new_weights_replace_quantized_ones(tmp_path: Path) -> None:
    """A matrix by its one name, beside parts that stay quantized."""
    chosen = FORMATS_BY_NAME["awq-gemm-g32"]
    packed, plain, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    names = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight")
    tensors = load_file(plain / "model.safetensors")
    others = {name: torch.randn(tensors[name].shape) * 0.1 for name in names}
    spec = read_model_spec(packed)
    check_replacements(load_model(spec, packed, new_factory(spec)), packed, "auto", others)
    model = load_model(spec, packed, new_factory(spec), progress=False, replaced=others)
    ids = torch.tensor([1, 2])
    down = model.blocks[1].mlp.down.weights.matrix
    assert torch.equal(down.rows(ids), others[names[1]][ids])
    x = torch.randn(2, HIDDEN)
    wanted = x @ others[names[0]].t() + tensors["model.layers.0.self_attn.k_proj.bias"]
    torch.testing.assert_close(model.blocks[0].qkv(x)[:, 128:192], wanted, rtol=0, atol=1e-4)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ gives every matrix one; others than zeros belong to another model."""
    chosen = FORMATS_BY_NAME["gptq-4"]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    wanted = run(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.bias"
    save_file(tensors | {name: torch.zeros(HIDDEN).half()}, file)
    assert all(torch.equal(logits, wanted[seq]) for seq, logits in run(folder).items())
    save_file(tensors | {name: torch.ones(HIDDEN).half()}, file)
    with pytest.raises(ConfigError, match=r"1 tensor \('model.layers.1.mlp.down_proj.bias'\)"):
        run(folder)


@pytest.mark.parametrize("name", ["gptq-8", "gptq-4", "int8-bnb"])
def test_matrices_that_are_transposed_on_disk(name: str, tmp_path: Path) -> None:
    """GPT-2 stores [inputs, outputs], its quantized matrices have the order of all others; c_proj
    is square."""
    chosen = FORMATS_BY_NAME[name]
    folders = (tmp_path / "plain", tmp_path / "packed")
    for folder in folders:
        write_checkpoint(Case("gpt2", "gpt2", {"n_embd": 64, "n_layer": 1}), folder)
    random = np.random.default_rng(3)
    plain, packed = (load_file(folder / "model.safetensors") for folder in folders)
    for module in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        key = f"transformer.h.0.{module}"
        inputs, outputs = plain[f"{key}.weight"].shape
        tensors, numbers = chosen.write(outputs, inputs, random)
        plain[f"{key}.weight"] = numbers.t().contiguous()
        del packed[f"{key}.weight"]
        packed |= {f"{key}.{kind}": tensor for kind, tensor in tensors.items()}
    for folder, tensors in zip(folders, (plain, packed), strict=True):
        save_file(tensors, folder / "model.safetensors")
    config = json.loads((folders[1] / "config.json").read_text())
    settings = {"quantization_config": dict(chosen.settings)}
    (folders[1] / "config.json").write_text(json.dumps(config | settings))
    wanted = run(folders[0], formats=rounding(chosen))
    close(run(folders[1]), wanted, tolerance(chosen))
    names = [f"transformer.h.0.{module}.weight" for module in ("attn.c_proj", "mlp.c_fc")]
    others = {name: torch.randn(plain[name].t().shape) * 0.1 for name in names}
    spec = read_model_spec(folders[1])
    check_replacements(load_model(spec, folders[1], new_factory(spec)), folders[1], "auto", others)
    model = load_model(spec, folders[1], new_factory(spec), progress=False, replaced=others)
    ids = torch.tensor([1, 2])
    for layer, name in ((model.blocks[0].output, names[0]), (model.blocks[0].mlp.up, names[1])):
        assert torch.equal(layer.weights.matrix.rows(ids), others[name][ids])


def test_an_order_of_inputs_that_was_never_set(tmp_path: Path) -> None:
    """compressed-tensors stores -1 for each input then."""
    chosen = FORMATS_BY_NAME["compressed-w4a16-asym"]
    folder, _, numbers = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    file, module = folder / "model.safetensors", "model.layers.0.mlp.down_proj"
    unset = {f"{module}.weight_g_idx": torch.full((HIDDEN,), -1, dtype=torch.int32)}
    save_file(load_file(file) | unset, file)
    layout = read_checkpoint(folder).tensors[f"{module}.weight"].packed
    assert layout is not None
    assert torch.equal(stored_matrix(layout).numbers(), numbers[module])

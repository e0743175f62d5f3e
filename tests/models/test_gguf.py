"""A GGUF file gives the logits of the Hugging Face folder with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.gguf_mamba import ARCHITECTURES, mamba_metadata
from tests.gguf_writer import (
    PACKERS,
    Tensor,
    float_tensor,
    gguf_metadata,
    gguf_name,
    gguf_tensors,
    random_tensor,
    write_gguf,
)
from tests.models.families import CASES as FAMILY_CASES
from tests.models.families import GEMMA4_WHOLE, Case, random_sequences, write_checkpoint
from tests.models.harness import PagedModel, new_factory, new_ops

from quire.base.errors import ConfigError
from quire.compute.layers.weights import PackedWeights
from quire.compute.models import load_model
from quire.compute.quantization import StoredMatrix
from quire.compute.quantization.packed import keep
from quire.compute.worker.weight_stash import reachable_tensors
from quire.config.families.reader import read_model_spec
from quire.config.hf import StoredTensor
from quire.config.packed import GGUFBlocks, PackedLayout
from quire.config.packed.block_kinds import BlockFormat
from quire.ops import REFERENCE
from quire.ops.linear.blocks.contract import quantize_groups

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_GRANITE = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.75,
    "attention_multiplier": 0.25,
    "logits_scaling": 4.0,
}
CASES = (
    Case("llama", "llama"),
    Case("llama-tied-bias", "llama", {"tie_word_embeddings": True, "attention_bias": True}),
    Case("llama-head-dim", "llama", {"head_dim": 16}),
    Case("qwen2", "qwen2"),
    Case("qwen3-tied", "qwen3", {"tie_word_embeddings": True}),
    Case("gemma3", "gemma3_text", {"query_pre_attn_scalar": 16}),
    GEMMA4_WHOLE,
    next(case for case in FAMILY_CASES if case.name == "gemma4-26b"),
    Case("phi3", "phi3", {"sliding_window": 9, "num_key_value_heads": 1}),
    Case(
        "phi3-longrope",
        "phi3",
        {
            "original_max_position_embeddings": 40,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 4.0],
                "attention_factor": 1.25,
            },
        },
    ),
    Case("glm4", "glm4"),
    Case("olmo2", "olmo2"),
    Case("olmo3", "olmo3"),
    Case(
        "granite",
        "granite",
        _GRANITE,
    ),
    Case("seed-oss", "seed_oss"),
    Case("smollm3", "smollm3"),
    Case("lfm2", "lfm2"),
    Case("lfm2-untied", "lfm2", {"tie_word_embeddings": False, "conv_L_cache": 4}),
    Case("qwen3.5", "qwen3_5_text"),
    Case(
        "qwen3.5-tied", "qwen3_5_text", {"tie_word_embeddings": True, "linear_num_value_heads": 4}
    ),
    Case("qwen3.5-moe", "qwen3_5_moe_text"),
    Case("qwen3-next", "qwen3_next"),
    Case("lfm2-moe", "lfm2_moe"),
    Case("lfm2-moe-dense-first", "lfm2_moe", {"num_dense_layers": 2, "tie_word_embeddings": False}),
    Case("mamba2", "mamba2"),
    Case("mamba2-tied", "mamba2", {"n_groups": 1, "tie_word_embeddings": True}),
    Case("granite-4", "granitemoehybrid", _GRANITE),
    Case("granite-4-rope", "granitemoehybrid", {**_GRANITE, "position_embedding_type": "rope"}),
    Case("granite-4-moe", "granitemoehybrid", {**_GRANITE, "num_local_experts": 5}),
    Case("mixtral", "mixtral"),
    Case("qwen2-moe", "qwen2_moe"),
    Case("qwen3-moe", "qwen3_moe", {"norm_topk_prob": True}),
    Case("olmoe", "olmoe"),
    Case("glm4-moe", "glm4_moe", {"routed_scaling_factor": 2.5, "use_qk_norm": True}),
    *(
        next(case for case in FAMILY_CASES if case.name == name)
        for name in ("deepseek-v2", "deepseek-v3")
    ),
    Case(
        "deepseek-v2-lite",
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
            "qk_rope_head_dim": 32,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    Case("glm4-moe-lite", "glm4_moe_lite"),
    Case("minicpm3", "minicpm3", {"dim_model_base": 256}),
    Case("gpt-oss", "gpt_oss", {"num_experts_per_tok": 3, "rope_parameters": _GPT_OSS_ROPE}),
    Case(
        "granite-moe",
        "granitemoe",
        _GRANITE,
    ),
)


DELTA = ("qwen35", "qwen35moe", "qwen3next")
DRAFT_PARTS = ("attn_norm.weight", "nextn.enorm.weight")


def architecture_of(case: Case) -> str:
    """OLMo 3 files are of OLMo 2, with a window."""
    own = {
        "olmo3": "olmo2",
        "qwen2_moe": "qwen2moe",
        "qwen3_moe": "qwen3moe",
        "glm4_moe": "glm4moe",
        "lfm2_moe": "lfm2moe",
        "gpt_oss": "gpt-oss",
        "qwen3_5_text": "qwen35",
        "qwen3_5_moe_text": "qwen35moe",
        "qwen3_next": "qwen3next",
        "deepseek_v2": "deepseek2",
        "deepseek_v3": "deepseek2",
        "glm4_moe_lite": "deepseek2",
        "granitemoehybrid": "granitehybrid",
    }
    return own.get(case.model_type, case.model_type.removesuffix("_text"))


def _ropes(config: Any) -> dict[str, Any]:
    """Return the parameters of positions; {} of a model that sees none."""
    return getattr(config, "rope_parameters", None) or {}


def settings_of(case: Case, config: Any) -> dict[str, Any]:
    architecture = architecture_of(case)
    write = mamba_metadata if architecture in ARCHITECTURES else gguf_metadata
    settings = write(architecture, config)
    architecture = settings["general.architecture"]
    ropes = _ropes(config)
    if not ropes:
        return settings
    full = ropes.get("full_attention", ropes)
    if "attention_factor" in full:
        settings[f"{architecture}.rope.scaling.attn_factor"] = float(full["attention_factor"])
    if full.get("rope_type") == "yarn":
        start = f"{architecture}.rope.scaling"
        settings |= {
            f"{start}.type": "yarn",
            f"{start}.factor": float(full["factor"]),
            f"{start}.original_context_length": full["original_max_position_embeddings"],
        }
    if (sliding := ropes.get("sliding_attention")) is not None and architecture == "gemma4":
        settings["gemma4.rope.freq_base_swa"] = float(sliding["rope_theta"])
    return settings | {f"{architecture}.rope.freq_base": float(full["rope_theta"])}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_are_those_of_the_folder(case: Case, tmp_path: Path) -> None:
    config = write_checkpoint(case, tmp_path).config
    config.allow_global_per_layer_attribute_access = True  # layers of Gemma 4 differ
    architecture = architecture_of(case)
    tensors = gguf_tensors(tmp_path, architecture, config)
    for kind in ("short", "long"):
        if (divisors := _ropes(config).get(f"{kind}_factor")) is not None:
            tensors[f"rope_factors_{kind}.weight"] = float_tensor(torch.tensor(divisors))
    if architecture == "gemma4":
        head_dim = config.per_layer_config[config.num_hidden_layers - 1].head_dim
        share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
        count = int(share * head_dim // 2)
        divisors = torch.tensor([1.0] * count + [1e30] * (head_dim // 2 - count))
        tensors["rope_freqs.weight"] = float_tensor(divisors)
    if architecture == "glm4moe" or architecture in DELTA:  # a block that guesses further tokens
        last = f"blk.{config.num_hidden_layers}."
        tensors |= {last + part: float_tensor(torch.ones(3)) for part in DRAFT_PARTS}
    file = write_gguf(tmp_path / "model.gguf", settings_of(case, config), tensors)
    sequences = random_sequences()
    wanted = PagedModel(tmp_path, "reference", 64).step(sequences)
    found = PagedModel(file, "reference", 64).step(sequences)
    # Gemma's norms are stored with the 1 added, and rates of states not as logarithms.
    is_changed = architecture in ("gemma3", *DELTA, *ARCHITECTURES)
    tolerance = 1e-4 if is_changed else 0.0
    for seq in sequences:
        torch.testing.assert_close(found[seq], wanted[seq], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_experts", "groups"), [(8, (1, 1)), (160, (8, 3)), (256, (8, 4))])
def test_files_that_state_no_groups_of_experts(
    num_experts: int, groups: tuple[int, int], tmp_path: Path
) -> None:
    """DeepSeek V2, V3 and R1 have groups also where an older file says nothing; others have none.
    Turns red when experts of Kimi K2 or GLM-4.7-Flash are chosen within those of V3."""
    kind = "deepseek_v2" if num_experts == 160 else "deepseek_v3"
    case = Case(kind, kind, {"n_routed_experts": num_experts, "n_group": 1, "topk_group": 1})
    config = write_checkpoint(case, tmp_path).config
    settings = settings_of(case, config)
    kept = {key: value for key, value in settings.items() if "expert_group" not in key}
    assert len(kept) == len(settings) - 2
    file = write_gguf(tmp_path / "model.gguf", kept, gguf_tensors(tmp_path, "deepseek2", config))
    experts = read_model_spec(file).experts
    assert experts is not None
    assert (experts.routing.num_groups, experts.routing.top_groups) == groups


def test_progress_names_the_kind_of_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case("qwen2", "qwen2")
    config = write_checkpoint(case, tmp_path).config
    tensors = gguf_tensors(tmp_path, "qwen2", config)
    file = write_gguf(tmp_path / "model.gguf", settings_of(case, config), tensors)
    spec = read_model_spec(file)
    capfd.readouterr()
    load_model(spec, file, new_factory(spec), progress=True)
    assert capfd.readouterr().err.startswith("Loading GGUF checkpoint shards: 100% | ")


@pytest.mark.parametrize("parts", [1, 2])
def test_quantized_matrices_and_parts(parts: int, tmp_path: Path) -> None:
    """Packed matrices equal their numbers in a folder, from one file or several."""
    case = Case("qwen2", "qwen2", {"hidden_size": 64, "intermediate_size": 256})
    config = write_checkpoint(case, tmp_path).config
    plain = load_file(tmp_path / "model.safetensors")
    tensors = gguf_tensors(tmp_path, "qwen2", config)
    kinds = {"down_proj": "Q4_K", "q_proj": "Q4_0", "up_proj": "Q8_0", "embed_tokens": "Q5_1"}
    for seed, name in enumerate(plain):
        kind = kinds.get(name.split(".")[-2])
        if kind is not None and name.endswith("weight"):
            d = 2.0**-14 if kind == "Q4_K" else 2.0**-7
            packed, numbers = random_tensor(kind, tuple(plain[name].shape), seed, d)
            tensors[gguf_name(name, "qwen2")], plain[name] = packed, numbers
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    settings = settings_of(case, config) | {"split.count": parts}
    names = list(tensors)
    files = [tmp_path / "model.gguf"]
    if parts > 1:
        files = [tmp_path / f"model-{i:05d}-of-{parts:05d}.gguf" for i in range(1, parts + 1)]
    for index, path in enumerate(files):
        own: dict[str, Tensor] = {name: tensors[name] for name in names[index::parts]}
        write_gguf(path, settings if index == 0 else {"split.no": index}, own)
    sequences = random_sequences()
    found = PagedModel(files[0], "reference", 64)
    assert found.spec.dtype == "float32"  # of most numbers
    wanted = PagedModel(tmp_path, "reference", 64).step(sequences)
    logits = found.step(sequences)
    # Some matrices, beside plain ones, take activations in 8 bits.
    for seq in sequences:
        assert (logits[seq] - wanted[seq]).std() < 0.05 * wanted[seq].std()


def test_a_bias_beside_a_quantized_matrix(tmp_path: Path) -> None:
    """One of zeros is left out, others belong to another model."""
    config = write_checkpoint(Case("qwen2", "qwen2", {"hidden_size": 64}), tmp_path).config
    tensors = gguf_tensors(tmp_path, "qwen2", config)
    for name in ("blk.0.attn_output", "blk.1.attn_output"):
        shape = tensors[f"{name}.weight"].shape
        tensors[f"{name}.weight"] = random_tensor("Q8_0", (64, shape[-1]), 3, 0.01)[0]
    settings = settings_of(Case("qwen2", "qwen2"), config)
    file = write_gguf(tmp_path / "model.gguf", settings, tensors)
    wanted = PagedModel(file, "reference", 64).step({0: [3, 1, 4]})[0]
    bias = {"blk.0.attn_output.bias": float_tensor(torch.zeros(64))}
    file = write_gguf(tmp_path / "model.gguf", settings, tensors | bias)
    assert torch.equal(PagedModel(file, "reference", 64).step({0: [3, 1, 4]})[0], wanted)
    bias["blk.1.attn_output.bias"] = float_tensor(torch.ones(64))
    file = write_gguf(tmp_path / "model.gguf", settings, tensors | bias)
    with pytest.raises(ConfigError, match=r"1 tensor \('model.layers.1.self_attn.o_proj.bias'\)"):
        PagedModel(file, "reference", 64)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantized_experts(kind: str, tmp_path: Path) -> None:
    """All experts of a block in one tensor keep their bits, each under its name. Turns red when an
    expert gets the rows of another one."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "norm_topk_prob": True}
    case = Case("qwen3-moe", "qwen3_moe", sizes)
    config = write_checkpoint(case, tmp_path).config
    tensors = gguf_tensors(tmp_path, "qwen3moe", config)
    plain = load_file(tmp_path / "model.safetensors")
    for seed, name in enumerate(name for name in tensors if "_exps" in name):
        experts, rows, columns = tensors[name].shape
        packed, numbers = random_tensor(kind, (experts * rows, columns), seed, 2.0**-7)
        tensors[name] = Tensor(kind, (experts, rows, columns), packed.data)
        _, layer, part, _ = name.split(".")
        stem = f"model.layers.{layer}.mlp.experts"
        part = part.removeprefix("ffn_").removesuffix("_exps")
        for expert, matrix in enumerate(numbers.view(experts, rows, columns)):
            plain[f"{stem}.{expert}.{part}_proj.weight"] = matrix.contiguous()
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    file = write_gguf(tmp_path / "model.gguf", settings_of(case, config), tensors)
    sequences = random_sequences((9, 4))
    wanted = PagedModel(tmp_path, "reference", 64).step(sequences)
    logits = PagedModel(file, "best", 64).step(sequences)
    for seq in sequences:  # such matrices take activations in 8 bits
        assert (logits[seq] - wanted[seq]).std() < 0.05 * wanted[seq].std()


@pytest.mark.parametrize("stored", ["folder", "file", "dummy"])
def test_one_layer_at_a_time_has_some_of_its_parts(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: all experts of a block wait for their second matrix at once, and take the memory of
    both."""
    case = Case("qwen3-moe", "qwen3_moe", {"norm_topk_prob": True})
    config = write_checkpoint(case, tmp_path).config
    tensors = gguf_tensors(tmp_path, "qwen3moe", config)
    file = write_gguf(tmp_path / "model.gguf", settings_of(case, config), tensors)
    loaded, finished = set[int](), set[int]()
    load, finish = PackedWeights[Any].load, PackedWeights[Any].finish

    def loads(self: Any, part: str, tensor: torch.Tensor) -> None:
        loaded.add(id(self))
        assert len(loaded - finished) == 1
        load(self, part, tensor)

    def finishes(self: Any) -> None:
        finished.add(id(self))
        finish(self)

    monkeypatch.setattr(PackedWeights, "load", loads)
    monkeypatch.setattr(PackedWeights, "finish", finishes)
    place = file if stored == "file" else tmp_path
    spec = read_model_spec(place)
    model = load_model(spec, place, new_factory(spec), "dummy" if stored == "dummy" else "auto")
    assert model is not None
    assert spec.experts is not None
    assert len(finished) > 2 * spec.num_layers * spec.experts.routing.num_experts


def test_experts_of_gpt_oss_keep_four_bits(tmp_path: Path) -> None:
    """Gate and up are apart in a file, take turns in a folder, and have biases. Turns red when an
    expert gets other rows or numbers."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts_per_tok": 2}
    case = Case("gpt-oss", "gpt_oss", {**sizes, "rope_parameters": _GPT_OSS_ROPE})
    config = write_checkpoint(case, tmp_path).config
    tensors = gguf_tensors(tmp_path, "gpt-oss", config)
    plain = load_file(tmp_path / "model.safetensors")
    names = [name for name in tensors if name.endswith("_exps.weight")]
    for seed, name in enumerate(names):
        experts, rows, columns = tensors[name].shape
        packed, numbers = random_tensor("MXFP4", (experts * rows, columns), seed, 1.0)
        data = bytearray(packed.data)
        for start in range(0, len(data), 17):
            factor = 2.0 ** (124 - data[start])
            numbers.view(-1)[start // 17 * 32 : start // 17 * 32 + 32] *= factor
            data[start] = 124
        tensors[name] = Tensor("MXFP4", (experts, rows, columns), bytes(data))
        stem = f"model.layers.{name.split('.')[1]}.mlp.experts."
        turned = numbers.view(experts, rows, columns).transpose(1, 2)
        if "down" in name:
            plain[f"{stem}down_proj"] = turned.contiguous()
        else:
            plain[f"{stem}gate_up_proj"][:, :, int("up" in name) :: 2] = turned
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    file = write_gguf(tmp_path / "model.gguf", settings_of(case, config), tensors)
    sequences = random_sequences((9, 4))
    wanted = PagedModel(tmp_path, "reference", 64).step(sequences)
    model = PagedModel(file, "best", 64)
    logits = model.step(sequences)
    for seq in sequences:  # such matrices take activations in 8 bits
        assert (logits[seq] - wanted[seq]).std() < 0.05 * wanted[seq].std()


@pytest.mark.parametrize("implementation", ["reference", "best"])
@pytest.mark.parametrize("kind", PACKERS)
def test_a_type_keeps_its_bits(kind: str, implementation: str) -> None:
    """Rows are the numbers to the bit, products those of the numbers by activations of 8 bits.
    Turns red when a type is widened, or the plan counts other bytes than there are."""
    d = 2.0**-14 if kind.endswith(("_K", "_XS")) else 2.0**-7
    parts = [random_tensor(kind, (rows, 512), rows, d) for rows in (40, 24)]
    stored = [_stored(kind, tensor) for tensor, _ in parts]
    numbers = torch.cat([each for _, each in parts])
    kept = keep(new_ops(implementation), stored, None, torch.float32)
    assert not kept.by_torch
    ids = torch.tensor([63, 0, 39, 40])
    assert torch.equal(kept.matrix.rows(ids), numbers[ids])
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    kernel = BlockFormat.named(stored[0].kernel or "")
    assert kernel is not None
    rounded, scale = quantize_groups(x, kernel.kind.group_size)
    wanted = (rounded * scale).flatten(1) @ numbers.t()
    size = float(wanted.abs().max())
    torch.testing.assert_close(kept.matrix(x), wanted, rtol=0, atol=2e-5 * size)
    if implementation == "best" and new_ops("best").chosen["linear_blocks"] != REFERENCE:
        sizes = {t.untyped_storage().data_ptr(): t.nbytes for t in reachable_tensors(kept.matrix)}
        assert sum(sizes.values()) == sum(each.layout.bytes_on("cpu") for each in stored)


def _stored(kind: str, tensor: Tensor) -> StoredMatrix:
    scheme, (outputs, inputs) = GGUFBlocks(kind), tensor.shape
    blocks = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(outputs, -1)
    info = StoredTensor("w", (outputs, inputs), kind, Path("w.gguf"), 0, blocks.numel())
    layout = PackedLayout(
        "w", scheme, outputs, inputs, {"blocks": info}, (), scheme.kernels(inputs)
    )
    return StoredMatrix(layout, {"blocks": blocks})


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_scales_that_are_not_finite_are_refused(kind: str) -> None:
    """Turns red when a damaged file makes every answer NaN."""
    tensor, _ = random_tensor(kind, (32, 256), 0, 0.5)
    broken = Tensor(kind, tensor.shape, b"\x00\x7c" + tensor.data[2:])
    with pytest.raises(ConfigError, match=r"w\.gguf: tensor 'w' holds scales that are not finite"):
        keep(new_ops("reference"), [_stored(kind, broken)], None, torch.float32)

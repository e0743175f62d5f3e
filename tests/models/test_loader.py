"""Loading: the forms that a checkpoint may have, and the faults that it is refused for."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import CASES, random_sequences, write_checkpoint
from tests.models.harness import PagedModel, new_factory, new_ops

from quire.base.errors import ConfigError
from quire.bundled import bundled_model_path
from quire.compute.models import ARCHITECTURES, CausalLM, find_model, load_model
from quire.compute.models.loader import match_weights, read_weights
from quire.compute.quantization import QuantizedFormats
from quire.config import ModelSpec, read_checkpoint, read_model_spec
from quire.config.families import SUPPORTED_ARCHITECTURES
from quire.config.quantization import QUANTIZATIONS

Tensors = dict[str, torch.Tensor]
CASE_BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case by its name, written once."""
    folders: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            write_checkpoint(CASE_BY_NAME[name], folders[name])
        return folders[name]

    return write


def rewrite(
    source: Path,
    folder: Path,
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    **config: Any,
) -> Path:
    """A copy of a checkpoint with its tensors and config.json changed."""
    settings = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(change(load_file(source / "model.safetensors")), folder / "model.safetensors")
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    return PagedModel(folder, "reference", 64).step({0: random_sequences()[0]})[0]


def load(folder: Path, **options: Any) -> CausalLM:
    spec = read_model_spec(folder)
    return load_model(spec, folder, new_factory(spec), progress=False, **options)


RENAMES = {
    "no-prefix": lambda name: name.removeprefix("model."),
    "compiled": lambda name: "_orig_mod." + name,
    "compiled-inside": lambda name: name.replace("model.layers.", "model._orig_mod.layers."),
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_other_spellings_of_names(
    originals: Callable[[str], Path], tmp_path: Path, rename: Callable[[str], str]
) -> None:
    """Catches checkpoints of base models, or saved from torch.compile, being refused."""
    source = originals("llama")
    folder = rewrite(source, tmp_path, lambda tensors: {rename(k): v for k, v in tensors.items()})
    assert torch.equal(logits_of(folder), logits_of(source))


@pytest.mark.parametrize(
    "extra",
    ["v_head.summary.weight", "score.weight", "classifier.out_proj.bias", "medusa_head.0.0.weight"],
)
def test_heads_of_trainers_are_left_out(
    extra: str,
    originals: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fault: a model that was trained with a value head is refused."""
    source = originals("llama")
    folder = rewrite(source, tmp_path, lambda tensors: tensors | {extra: torch.ones(4)})
    assert torch.equal(logits_of(folder), logits_of(source))
    assert f"1 tensor ('{extra}') is left out" in caplog.text


@pytest.mark.parametrize(
    "extra",
    [
        "lm_head.bias", "model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight", "logit_scale", "embedding_norm.weight",
    ],
)  # fmt: skip
def test_what_would_change_results_is_refused(
    extra: str, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = rewrite(originals("llama"), tmp_path, lambda tensors: tensors | {extra: torch.ones(4)})
    with pytest.raises(
        ConfigError, match=re.escape(f"1 tensor ('{extra}') is in the weight files")
    ):
        load(folder)


def test_gpt2_as_first_published(originals: Callable[[str], Path], tmp_path: Path) -> None:
    """Catches GPT-2's own files being refused: no prefix, and mask buffers among the weights."""
    source = originals("gpt2")

    def old(tensors: Tensors) -> Tensors:
        plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return plain | {
            "h.0.attn.bias": torch.ones(1, 1, 8, 8),
            "h.1.attn.masked_bias": torch.ones(1),
        }

    folder = rewrite(source, tmp_path, old)
    assert torch.equal(logits_of(folder), logits_of(source))


def test_old_llama_buffers_are_ignored(originals: Callable[[str], Path], tmp_path: Path) -> None:
    """Catches Llama 1 and 2 files with saved frequencies being refused."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = originals("llama")
    folder = rewrite(source, tmp_path, lambda tensors: tensors | {name: torch.ones(4)})
    assert torch.equal(logits_of(folder), logits_of(source))


def test_tied_head(originals: Callable[[str], Path], tmp_path: Path) -> None:
    """Catches a tied checkpoint refused because it also stores the head, or only the head, and a
    head that was trained on its own being replaced by the embedding."""
    source = originals("llama-tied")
    embed, head = "model.embed_tokens.weight", "lm_head.weight"

    def variant(name: str, change: Callable[[Tensors], Tensors]) -> torch.Tensor:
        folder = tmp_path / name
        folder.mkdir()
        return logits_of(rewrite(source, folder, change))

    expected = logits_of(source)
    assert torch.equal(variant("both", lambda t: t | {head: t[embed].clone()}), expected)
    moved = variant("moved", lambda t: {head if k == embed else k: v for k, v in t.items()})
    assert torch.equal(moved, expected)
    own = variant("own", lambda t: t | {head: 2 * t[embed]})
    assert torch.allclose(own, 2 * expected)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells the pages held")
def test_weights_that_were_loaded_hold_no_memory(tmp_path: Path) -> None:
    """Fault: all of a file is in memory at the end, beside the weights that were made of it. In the
    second folder no tensor begins where its numbers are aligned."""
    folder = bundled_model_path()
    spec, size = read_model_spec(folder), (folder / "model.safetensors").stat().st_size
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" "  # now all begin at odd places
    odd = tmp_path / "model.safetensors"
    odd.write_bytes((length + 1).to_bytes(8, "little") + header + content[8 + length :])

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE

    expected = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    for each in (folder, tmp_path):
        checkpoint = read_checkpoint(each)
        _, plan = match_weights(spec, each, new_factory(spec), checkpoint)
        num_compared, before = 0, held()
        dtype = getattr(torch, spec.dtype)
        weights = read_weights(plan, checkpoint.files, dtype, progress=False)
        names = {id(target): info.name for info, target in plan}
        for target, weight in weights:
            assert isinstance(weight, torch.Tensor)
            assert torch.equal(weight, expected[names.pop(id(target))])
            num_compared += weight.nbytes
            assert held() - before < size // 2
        assert num_compared > 0.9 * size and not names


def test_weights_in_another_dtype(originals: Callable[[str], Path], tmp_path: Path) -> None:
    """Catches weights reinterpreted, not converted, when dtype differs from the files."""
    source = originals("llama")
    folder = rewrite(source, tmp_path, dtype="bfloat16")
    got, expected = logits_of(folder), logits_of(source)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() / expected.abs().max() < 0.1


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


O_PROJ = "model.layers.1.self_attn.o_proj.weight"
REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str]] = {
    "missing": (without(O_PROJ), {}, rf"1 tensor \('{O_PROJ}'\) is missing"),
    "many missing": (
        lambda tensors: {k: v for k, v in tensors.items() if "layers" not in k},
        {},
        r"18 tensors \('model\.layers\.0\.(.*?, ){5}\.\.\.\) are missing",
    ),
    "no head": (without("lm_head.weight"), {}, "'lm_head.weight'.* is missing"),
    "unexpected": (
        lambda tensors: tensors | {"model.layers.0.extra.weight": torch.ones(2)},
        {},
        r"'model\.layers\.0\.extra\.weight'\) is in the weight files",
    ),
    "bias not in config": (
        lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)},
        {},
        "q_proj.bias",
    ),
    "more layers": (lambda tensors: tensors, {"num_hidden_layers": 1}, "9 tensors .* are in"),
    "shape": (
        lambda tensors: tensors | {O_PROJ: torch.ones(32, 31)},
        {},
        rf"'{O_PROJ}' has shape \[32, 31\], but config.json asks for \[32, 32\]",
    ),
    "integers": (
        lambda tensors: tensors | {O_PROJ: torch.ones(32, 32, dtype=torch.int8)},
        {},
        f"'{O_PROJ}' is stored as I8",
    ),
}


@pytest.mark.parametrize(("change", "config", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(
    originals: Callable[[str], Path],
    tmp_path: Path,
    change: Callable[[Tensors], Tensors],
    config: dict[str, Any],
    message: str,
) -> None:
    """Catches a model that runs with uninitialised or leftover weights."""
    folder = rewrite(originals("llama"), tmp_path, change, **config)
    with pytest.raises(ConfigError, match=message):
        load(folder)


EVERY_KIND = ("llama-bias", "llama-tied", "qwen3", "gemma2", "opt-350m", "gpt2", "mpt")


@pytest.mark.parametrize("name", EVERY_KIND)
def test_any_tensor_that_is_not_finite_is_named(
    originals: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Catches NaN or infinity in a matrix, bias, norm or embedding that is met in the answers."""
    source = originals(name)
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    spec = read_model_spec(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for number, broken in enumerate(tensors):
        poisoned = tensors[broken].clone()
        place = int(torch.randint(poisoned.numel(), (), generator=generator))
        poisoned.view(-1)[place] = (float("nan"), float("inf"), -float("inf"))[number % 3]
        save_file(tensors | {broken: poisoned}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError) as caught:
            load_model(spec, tmp_path, new_factory(spec), progress=False)
        message = str(caught.value)
        assert f"{tmp_path / 'model.safetensors'}: tensor {broken!r} holds" in message
        assert f"1 of its {poisoned.numel()} numbers are not finite" in message
        assert "fetch the checkpoint again" in message


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        *((None, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)),
        *((name, torch.bfloat16) for name in QUANTIZATIONS),
    ],
)
def test_infinite_weights_are_found_in_every_format(
    originals: Callable[[str], Path], tmp_path: Path, quantization: str | None, stored: torch.dtype
) -> None:
    """Catches a quantizer that turns them into numbers that look like others."""
    for place in (0, 517, -1):

        def poison(tensors: Tensors, place: int = place) -> Tensors:
            changed = {name: tensor.to(stored) for name, tensor in tensors.items()}
            changed[O_PROJ].view(-1)[place] = -float("inf")
            return changed

        folder = rewrite(originals("llama"), tmp_path, poison)
        spec = read_model_spec(folder)
        factory = new_factory(spec, formats=QuantizedFormats(quantization, new_ops("reference")))
        with pytest.raises(ConfigError, match=f"'{O_PROJ}' holds -inf at"):
            load_model(spec, folder, factory, progress=False)


@pytest.mark.parametrize(
    ("stored", "dtype", "value", "message"),
    [
        (torch.float32, "float16", 7e4, "holds 70000, .* in float16; .*'bfloat16' or 'float32'"),
        (torch.bfloat16, "float16", -7e4, "holds -70144, .* in float16"),
        (torch.float32, "bfloat16", 3.4e38, "holds .* in bfloat16; give dtype='float32'"),
        (torch.float64, "float32", 1e300, r"holds 1e\+300, .* in float32; use another checkpoint"),
    ],
)
def test_weights_beyond_the_dtype(
    originals: Callable[[str], Path],
    tmp_path: Path,
    stored: torch.dtype,
    dtype: str,
    value: float,
    message: str,
) -> None:
    """Catches weights that become infinite when they are converted; what fits still loads."""
    norm = "model.norm.weight"

    def large(tensors: Tensors) -> Tensors:
        return tensors | {norm: torch.full_like(tensors[norm], value, dtype=stored)}

    folder = rewrite(originals("llama"), tmp_path, large, dtype=dtype)
    with pytest.raises(ConfigError, match=f"tensor '{norm}' {message}"):
        load(folder)
    rewrite(
        originals("llama"), tmp_path, lambda t: t | {norm: t[norm].clamp(-1, 1) * 6e4}, dtype=dtype
    )
    load(folder)


def test_buffers_may_be_infinite(originals: Callable[[str], Path], tmp_path: Path) -> None:
    """Catches masks of old GPT-2 files, which nobody reads, being refused."""
    mask = {"transformer.h.0.attn.masked_bias": torch.tensor([-float("inf")])}
    load(rewrite(originals("gpt2"), tmp_path, lambda tensors: tensors | mask))


def test_truncated_file(originals: Callable[[str], Path], tmp_path: Path) -> None:
    """Catches a crash of the process (bus error) on a file that was cut off."""
    folder = rewrite(originals("llama"), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: broken.*expected \d+ bytes"):
        load(folder)


def test_unknown_architecture_and_format(originals: Callable[[str], Path]) -> None:
    """Catches a KeyError where the user needs the list of what is served."""
    with pytest.raises(ConfigError, match=r"'Nope' is not supported.*Qwen3ForCausalLM"):
        find_model("Nope")
    with pytest.raises(ConfigError, match="load_format='bin'"):
        load(originals("llama"), load_format="bin")


def test_every_architecture_has_a_model() -> None:
    """Catches a registry entry whose module or class was renamed, and a model that lacks its reader
    or is not registered."""
    assert set(ARCHITECTURES) == set(SUPPORTED_ARCHITECTURES)
    for architecture in ARCHITECTURES:
        assert callable(find_model(architecture))


@pytest.mark.parametrize("name", CASE_BY_NAME)
def test_parameter_counts(originals: Callable[[str], Path], name: str) -> None:
    """Catches a memory plan that is wrong where there are no files to measure."""
    folder = originals(name)
    spec, checkpoint = read_model_spec(folder), read_checkpoint(folder)
    tensors = checkpoint.tensors.values()
    unused = sum(each.num_bytes for each in tensors if ".self_attn.indexer." in each.name)
    assert spec.num_parameters * spec.dtype_bytes == checkpoint.num_bytes - unused


def weights_of(spec: ModelSpec, seed: int) -> list[torch.Tensor]:
    model: Any = load_model(spec, Path("nowhere"), new_factory(spec), "dummy", seed)
    matrices = [
        layer.weights.matrix
        for layer in (model.embed, *(layer for b in model.blocks for layer in (b.qkv, b.mlp.up)))
    ]
    plain = [model.embed_positions, *(block.mlp_norm for block in model.blocks)]
    return [layer.weight for layer in (*matrices, *plain)]


def stacked(tensors: Tensors, gate: str, up: str, down: str) -> Tensors:
    """Experts of each layer in two tensors, as `transformers` has them in memory."""
    pattern = re.compile(rf"(.+\.experts)\.(\d+)\.({gate}|{up}|{down})\.weight")
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in list(tensors):
        if match := pattern.fullmatch(name):
            prefix, number, kind = match.groups()
            found.setdefault(prefix, {})[int(number), kind] = tensors.pop(name)
    for prefix, parts in found.items():
        numbers = sorted({number for number, _ in parts})
        both = [torch.cat([parts[n, gate], parts[n, up]]) for n in numbers]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(both)
        tensors[f"{prefix}.down_proj"] = torch.stack([parts[n, down] for n in numbers])
    return tensors


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mixtral", ("w1", "w3", "w2")),
        ("qwen2-moe-mixed", ("gate_proj", "up_proj", "down_proj")),
        ("glm4-moe", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_in_one_tensor(
    originals: Callable[[str], Path], tmp_path: Path, name: str, parts: tuple[str, str, str]
) -> None:
    """Turns red when an expert gets rows of another, or gate and up change places."""
    folder = rewrite(originals(name), tmp_path, lambda tensors: stacked(tensors, *parts))
    assert any(each.endswith("gate_up_proj") for each in read_checkpoint(folder).tensors)
    assert torch.equal(logits_of(folder), logits_of(originals(name)))


def test_layers_that_guess_tokens_are_left_out(
    originals: Callable[[str], Path], tmp_path: Path
) -> None:
    """Turns red when a layer behind the last one is refused, or more of them are left out than
    config.json names."""

    def with_drafts(layer: int) -> Callable[[Tensors], Tensors]:
        return lambda tensors: tensors | {f"model.layers.{layer}.eh_proj.weight": torch.ones(4, 4)}

    folder = rewrite(originals("glm4-moe"), tmp_path, with_drafts(2), num_nextn_predict_layers=1)
    assert torch.equal(logits_of(folder), logits_of(originals("glm4-moe")))
    with pytest.raises(ConfigError, match=r"layers\.3\.eh_proj"):
        load(rewrite(originals("glm4-moe"), tmp_path, with_drafts(3)))


def test_an_expert_too_few_is_named(originals: Callable[[str], Path], tmp_path: Path) -> None:
    """Turns red when an expert stays as it was made because its tensor has another name."""

    def without(tensors: Tensors) -> Tensors:
        tensors.pop("model.layers.1.block_sparse_moe.experts.4.w2.weight")
        return tensors

    with pytest.raises(ConfigError, match=r"layers\.1\..*experts\.4\.w2.*missing"):
        load(rewrite(originals("mixtral"), tmp_path, without))


def test_dummy_weights(originals: Callable[[str], Path]) -> None:
    """Catches dummy weights that read files, differ between runs, or are not finite."""
    spec = read_model_spec(originals("opt-350m"))
    first, again, other = (weights_of(spec, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for weight in first:
        assert weight.isfinite().all()
        assert weight.dim() == 1 or 0.01 < weight.float().std() < 0.03
        assert weight.dim() == 1 or weight.unique(dim=0).shape == weight.shape


def test_progress(originals: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a log that fills with carriage returns, or misses the line scripts wait for."""
    folder = originals("llama-sharded")
    spec = read_model_spec(folder)
    capfd.readouterr()  # what transformers says when it writes the checkpoint
    load_model(spec, folder, new_factory(spec), progress=True)
    err = capfd.readouterr().err
    assert err.startswith("Loading safetensors checkpoint shards: 100% | ")
    assert err.count("\n") == 1
    assert "\r" not in err
    load_model(spec, folder, new_factory(spec), progress=False)
    assert capfd.readouterr().err == ""


def test_third_party_architecture(
    originals: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a plug-in that is installed but not found by both registries."""
    package = tmp_path / "plugin"
    (package / "plugin-1.0.dist-info").mkdir(parents=True)
    (package / "plugin-1.0.dist-info" / "METADATA").write_text("Name: plugin\nVersion: 1.0\n")
    (package / "plugin-1.0.dist-info" / "entry_points.txt").write_text(
        "[quire.model_specs]\nMyForCausalLM = quire_plugin_of_a_test:read\n"
        "LeavesForCausalLM = quire_plugin_of_a_test:leave\n"
        "NoneForCausalLM = quire_plugin_of_a_test:nothing\n"
        "[quire.models]\nMyForCausalLM = quire.compute.models.llama:LlamaModel\n"
        "LeavesForCausalLM = quire_plugin_of_a_test:leave\n"
    )
    (package / "quire_plugin_of_a_test.py").write_text(
        "import sys\nfrom quire.config.families.llama import read_llama\n\nread = read_llama\n"
        "def leave(*given):\n    sys.exit('no licence')\n"
    )
    monkeypatch.syspath_prepend(package)
    source, folder = originals("llama"), tmp_path / "model"
    folder.mkdir()
    rewrite(source, folder, architectures=["MyForCausalLM"])
    assert torch.equal(logits_of(folder), logits_of(source))
    with pytest.raises(ConfigError, match="MyForCausalLM, NemotronForCausalLM"):
        find_model("Nope")
    rewrite(source, folder, architectures=["LeavesForCausalLM"])
    with pytest.raises(ConfigError, match=r"'LeavesForCausalLM'.*SystemExit\('no licence'\)"):
        read_model_spec(folder)
    with pytest.raises(ConfigError, match=r"'LeavesForCausalLM'.*SystemExit\('no licence'\)"):
        find_model("LeavesForCausalLM")(None, None)  # type: ignore[arg-type]
    rewrite(source, folder, architectures=["NoneForCausalLM"])
    with pytest.raises(ConfigError, match=r"'NoneForCausalLM'.*AttributeError"):
        read_model_spec(folder)

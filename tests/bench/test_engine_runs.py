"""The benchmarks that compare CPU engines: the meaning of their rates, and their sums."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.base.platform import detect_platform
from quire.config import read_checkpoint, read_model_spec
from quire.config.memory.plan import weight_bytes
from quire.entrypoints.bench.machine import LimitProbe
from quire.entrypoints.llm import LLM
from quire.ops.native.binding import native_unavailable

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a machine take seconds at their real sizes."""
    small = partial(LimitProbe, read_bytes=4_000_000, size=64)
    for name in ("cpu_table", "cpu_mixed"):
        monkeypatch.setattr(
            importlib.import_module(f"benchmarks.peers.{name}"), "LimitProbe", small
        )


def timeline(wanted: Sequence[int], *steps: tuple[float, tuple[int, ...], float | None]) -> Any:
    engines = importlib.import_module("benchmarks.peers.engines")
    moments = tuple(engines.Moment(*step) for step in steps)
    return engines.Timeline((10,) * len(wanted), tuple(wanted), moments)


def test_decoding_counts_only_while_all_requests_decode() -> None:
    """Turns red when tokens that came while another prompt was computed count as decoded in no
    time, or when the steps of a shrunken batch count."""
    run = timeline(
        (4, 4),
        (1.0, (1, 0), 0.5),
        (2.0, (2, 1), 1.0),
        (3.0, (3, 2), 1.75),
        (4.0, (4, 3), 2.5),
        (9.0, (4, 4), 3.0),
    )
    assert run.decode_rate() == pytest.approx(4 / 2.0)
    assert run.share_outside_kernels() == pytest.approx(1 - 1.5 / 2)
    assert run.prefill_rate() == pytest.approx(20 / 2.0)
    assert run.output_rate() == pytest.approx(8 / 9.0)


def test_a_run_without_a_decode_phase_has_no_decode_rate() -> None:
    """Turns red when a rate is made of nothing."""
    run = timeline((2, 2), (1.0, (1, 0), None), (2.0, (2, 1), None), (3.0, (2, 2), None))
    with pytest.raises(ValueError, match="ask for more output tokens"):
        run.decode_rate()


class ScriptedEngine:
    """Gives the counts that it was told, then stays at the last ones."""

    def __init__(self, *counts: tuple[int, ...]) -> None:
        self._counts = list(counts)

    def start(self, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> None:
        pass

    def step(self) -> tuple[int, ...]:
        return self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]

    def kernel_seconds(self) -> None:
        return None


@pytest.mark.parametrize("counts", [[(1, 1), (2, 1)], [(1, 3)]], ids=["stuck", "too many"])
def test_a_run_with_other_tokens_than_asked_for_is_an_error(counts: list[tuple[int, ...]]) -> None:
    """Turns red when an engine that stops early looks fast."""
    engines = importlib.import_module("benchmarks.peers.engines")
    with pytest.raises(RuntimeError, match=r"not \(2, 2\)"):
        engines.run_requests(ScriptedEngine(*counts), [[1], [2]], [2, 2])


@pytest.mark.parametrize(
    ("size", "prompt_tokens", "output_tokens", "longest"),
    [(16, 1812, 2829, [740, 982]), (64, 7628, 7293, [256, 256])],
)
def test_mixed_workloads_have_their_totals(
    size: int, prompt_tokens: int, output_tokens: int, longest: list[int]
) -> None:
    """Turns red when a figure is compared with one of another workload."""
    work = importlib.import_module("benchmarks.peers.cpu_mixed").read_workload(size)
    assert len(work.prompt_lengths) == len(work.output_lengths) == size
    assert work.num_prompt_tokens == prompt_tokens
    assert work.num_output_tokens == output_tokens
    assert sorted(work.output_lengths)[-2:] == longest


def test_the_table_adds_up_and_skips_what_is_not_there(
    tiny_model: Path,
    small_limits: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Turns red when a rate, a share and the limit that it is of do not belong together, or when a
    missing engine ends the run."""
    results = tiny_model / "results"
    command = ["cpu_table.py", "--engine", "llama_cpp", "quire", "--model", str(tiny_model)]
    command += ["--weights", "Q8_0", "bfloat16", "--columns", "prefill", "4", "--repeats", "2"]
    command += ["--threads", "1", "--output-len", "8", "--output-folder", str(results)]
    command += ["--python", f"llama_cpp={tiny_model / 'python'}"]
    monkeypatch.setattr("sys.argv", command)
    table = importlib.import_module("benchmarks.peers.cpu_table")
    assert table.main() == 0
    shown = capsys.readouterr()
    assert re.search("llama.cpp, Q8_0: skipped, .*python does not start", shown.err)
    assert "| quire, bfloat16 |" in shown.out
    record = json.loads((results / "quire_bfloat16_prefill_4.json").read_text())
    figures = {name: figure["values"] for name, figure in record["figures"].items()}
    assert str(tiny_model) not in record["command"]
    weights = sum(
        importlib.import_module("benchmarks.peers.engines.random_checkpoint").count_weights(TINY)
    )
    # Elements of K and V in 4 sequences of 65 to 71 tokens.
    kv_heads = TINY["num_hidden_layers"] * TINY["num_key_value_heads"]
    sequences = 4 * 68 * 2 * kv_heads * TINY["head_dim"]
    for rate, share, before, after in zip(
        figures["decode_4_tokens_per_s"],
        figures["decode_4_share_of_read"],
        figures["decode_4_read_before_gb_per_s"],
        figures["decode_4_read_after_gb_per_s"],
        strict=True,
    ):
        bytes_per_step = 2 * weights + 2 * sequences
        assert share == pytest.approx(rate / 4 * bytes_per_step / ((before + after) / 2 * 1e9))
    assert all(0 < share < 1 for share in figures["decode_4_share_outside_kernels"])
    monkeypatch.setattr("sys.argv", ["cpu_table.py", "--show", *map(str, results.glob("*.json"))])
    assert table.main() == 0
    assert f"{np.median(figures['prefill_tokens_per_s']):.1f} (" in capsys.readouterr().out


def test_weights_count_as_their_format_keeps_them(tmp_path: Path) -> None:
    """Turns red when a share of the read is of fewer bytes than the weights of quire take."""
    engines, table = (
        importlib.import_module("benchmarks.peers.engines"),
        importlib.import_module("benchmarks.peers.cpu_table"),
    )
    checkpoint = importlib.import_module("benchmarks.peers.engines.random_checkpoint")
    config = TINY | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(tmp_path)
    norms = spec.num_layers * (2 * 256 + 2 * 64) + 256
    for name, form in engines.ENGINES["quire"].formats.items():
        quantization = None if name.startswith("bfloat16") else name.partition("_")[0]
        planned = weight_bytes(spec, None, quantization) - 2 * norms
        outputs = sum(shape.outputs * shape.count for shape in spec.matrices)
        channels = 4 * outputs if quantization else 0
        assert form.weight_bytes(*checkpoint.count_weights(config)) == planned - channels
    ours, theirs = (engines.ENGINES["quire"].formats, engines.ENGINES["openvino"].formats)
    assert ours["int4-g128-sym_kv8"] == theirs["INT4"]
    one = table.bytes_per_token("1", config, ours["int4"], 32)
    assert table.bytes_per_token("1", config, ours["int4_kv8"], 32) < one


def test_a_mixed_workload_gives_all_its_tokens(
    tiny_model: Path,
    small_limits: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Turns red when a request of the workload does not fit the engine that was made for it."""
    command = ["cpu_mixed.py", "--model", str(tiny_model), "--weights", "bfloat16"]
    command += ["--requests", "16", "--repeats", "2", "--threads", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--output-folder", str(tiny_model)])
    assert importlib.import_module("benchmarks.peers.cpu_mixed").main() == 0
    assert "quire, bfloat16, 16 requests: " in capsys.readouterr().out
    record = json.loads((tiny_model / "quire_bfloat16_16_requests.json").read_text())
    assert record["workload"]["num_output_tokens"] == 2829
    assert len(record["figures"]["output_tokens_per_s"]["values"]) == 2


@pytest.mark.parametrize("isa", ["avx2", "avx512_vnni"])
def test_engines_are_held_to_an_instruction_set(
    isa: str,
    tiny_model: Path,
    small_limits: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Turns red when the process of an engine uses more than it was told, or when an engine that
    cannot be told so is measured all the same."""
    if native_unavailable(isa, detect_platform()):
        pytest.skip(f"no {isa} here")
    for name in ("QUIRE_CPU_ISA", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "")  # as it was before, afterwards
    output = tiny_model / "results"
    command = f"cpu_table.py --engine quire llama_cpp --weights int8 Q8_0 --isa {isa} --columns 1"
    arguments = ["--model", str(tiny_model), "--output-folder", str(output), "--threads", "1"]
    few = ["--output-len", "3", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", [*command.split(), *arguments, *few])
    assert importlib.import_module("benchmarks.peers.cpu_table").main() == 0
    assert "llama.cpp, Q8_0: skipped, it cannot be held to" in capsys.readouterr().err
    record = json.loads(next(output.iterdir()).read_text())
    assert record["workload"]["isa"] == isa
    assert record["settings"]["kernels"] == isa


def test_nothing_measured_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when a script takes an empty table for a result."""
    command = ["cpu_mixed.py", "--engine", "vllm", "--python", "vllm=no-such-interpreter"]
    monkeypatch.setattr("sys.argv", command)
    assert importlib.import_module("benchmarks.peers.cpu_mixed").main() == 1
    err = capsys.readouterr().err
    assert "vLLM CPU, bfloat16: skipped, no-such-interpreter does not start" in err


def test_a_format_that_no_engine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when it measures nothing without a word."""
    cpu_mixed = importlib.import_module("benchmarks.peers.cpu_mixed")
    monkeypatch.setattr("sys.argv", ["cpu_mixed.py", "--weights", "int8", "int3"])
    with pytest.raises(SystemExit, match="int3 is no format of quire; there are bfloat16"):
        cpu_mixed.main()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--show no-such-file", "no-such-file cannot be read: "),
        ("--show benchmarks/results/attention_cpu.json", "not of cpu_table.py but of "),
        ("--threads 0", "0: not a number from 1 on"),
        ("--output-len 0", "0: not a number from 1 on"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Turns red when they end in a traceback, or look like an engine that is missing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["cpu_table.py", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("benchmarks.peers.cpu_table").main()
    assert expected in capsys.readouterr().err


WORKLOAD = '{"engine": "quire", "weights": "int8", "bits": 8}'


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        (f'"workload": {WORKLOAD}', "figures"),
        (f'"workload": {WORKLOAD}, "figures": {{}}', "figures"),
        ('"workload": {"engine": "quire"}, "figures": {"1_tokens_per_s": {}}', "workload"),
        ('"workload": {}', "workload and figures"),
    ],
)
def test_a_record_without_its_parts_is_refused(
    parts: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Turns red when such a record ends in a traceback."""
    (tmp_path / "part.json").write_text(f'{{"benchmark": "cpu_table", {parts}}}')
    monkeypatch.setattr("sys.argv", ["cpu_table.py", "--show", str(tmp_path / "part.json")])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("benchmarks.peers.cpu_table").main()
    assert f"part.json is no whole record: no {missing}\n" in capsys.readouterr().err


def test_a_kernel_benchmark_without_a_short_form_offers_none(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Turns red when --quick is taken and changes nothing."""
    monkeypatch.setattr("sys.argv", ["cpu_limits.py", "--quick"])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("benchmarks.kernels.kernel_figures").run(
            "a", "b", pytest.fail, has_quick=False
        )
    assert "unrecognized arguments: --quick" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "few"])
@pytest.mark.parametrize("argument", ["--threads", "--repeats"])
def test_kernel_benchmarks_refuse_numbers_that_mean_nothing(
    argument: str, number: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Turns red when they measure with another number than asked for, or end in a traceback."""
    monkeypatch.setattr("sys.argv", ["a_benchmark.py", f"{argument}={number}"])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("benchmarks.kernels.kernel_figures").run(
            "a_benchmark", "about", pytest.fail
        )
    assert f"{number}: not a number from 1 on" in capsys.readouterr().err


def test_the_random_checkpoint_is_a_model(tiny_model: Path) -> None:
    """Turns red when a tensor has a wrong name or shape, so that other engines compute less."""
    module = importlib.import_module("benchmarks.peers.engines.random_checkpoint")
    folder = module.write_checkpoint(tiny_model, tiny_model / "checkpoint", "bfloat16", 0)
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, quiet=True) as llm:
        [output] = llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
        assert output.error is None
        counts = llm.engine.spec.parameters
    norms = 2 * TINY["hidden_size"] + 2 * TINY["head_dim"]
    layers, head = module.count_weights(TINY)
    assert layers == TINY["num_hidden_layers"] * (counts.layer - norms)
    assert head == counts.embedding


def test_every_tensor_has_its_own_name_in_gguf() -> None:
    """Turns red when one tensor of a llama.cpp model replaces another."""
    module = importlib.import_module("benchmarks.peers.engines.gguf_file")
    names = [name for name, _ in module.random_tensors(TINY, 0)]
    assert len({module._gguf_name(name, "qwen3") for name in names}) == len(names) == 11 * 2 + 2


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "sliding_window": 16,
    "attention_bias": True,
}


def test_the_random_gpt_oss_is_a_model(tmp_path: Path) -> None:
    """Turns red when a tensor has a wrong name or shape, one of a llama.cpp model replaces another,
    or the weights that a token reads are counted wrong."""
    module, gguf = (
        importlib.import_module(f"benchmarks.peers.engines.{n}")
        for n in ("random_checkpoint", "gguf_file")
    )
    config = TINY | GPT_OSS
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = module.write_checkpoint(tmp_path, tmp_path / "checkpoint", "bfloat16", 0)
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, quiet=True) as llm:
        [output] = llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
        assert output.error is None
    hidden, inner = TINY["hidden_size"], TINY["intermediate_size"]
    heads = 2 * (TINY["num_attention_heads"] + TINY["num_key_value_heads"]) * TINY["head_dim"]
    attention, router, expert = hidden * heads, 4 * hidden, 3 * hidden * inner
    layers, head = module.count_weights(config)
    assert layers == TINY["num_hidden_layers"] * (attention + router + 2 * expert)
    assert head == TINY["vocab_size"] * hidden
    stacked = [name for name, _ in gguf._stacked(module.random_tensors(config, 0), 4)]
    names = {gguf._gguf_name(name, "gpt-oss") for name in stacked}
    assert len(names) == len(stacked) == 19 * TINY["num_hidden_layers"] + 3
    assert {"blk.0.attn_sinks.weight", "blk.1.ffn_up_exps.bias", "output.weight"} <= names


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1))
def test_rounding_is_that_of_bfloat16(values: list[float]) -> None:
    """Turns red when the two 16-bit formats start from different weights."""
    module = importlib.import_module("benchmarks.peers.engines.random_checkpoint")
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).bfloat16().float().numpy()
    np.testing.assert_array_equal(module._round_to_bfloat16(array.copy()), expected)


HYBRID = {"hidden_size": 64, "num_hidden_layers": 4, "head_dim": 32, "num_attention_heads": 2}
SHRUNK: dict[str, dict[str, Any]] = {
    "lfm2-1.2b": {**HYBRID, "num_key_value_heads": 1, "block_ff_dim": 96, "full_attn_idxs": [2]},
    "qwen3.5-0.8b": {
        **HYBRID,
        "intermediate_size": 96,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "deepseek-v2-lite-4-layers": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "n_routed_experts": 8,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
}


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
@pytest.mark.parametrize("shape", SHRUNK)
def test_a_random_file_is_a_model(shape: str, kind: str, tmp_path: Path) -> None:
    """Turns red when the file of a shape lacks a tensor or a setting, or has other numbers than
    were drawn; those of Q8_0 may be half a step away."""
    from transformers import AutoConfig

    from quire.compute.quantization.gguf import GGUFReader

    config = json.loads((ROOT / "benchmarks" / "models" / shape / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 256} | SHRUNK[shape]))
    module = importlib.import_module("benchmarks.peers.engines.random_gguf")
    file = module.write_random_gguf(tmp_path, tmp_path / "model.gguf", kind, 0)
    with LLM(str(file), skip_tokenizer_init=True, num_threads=1, quiet=True) as llm:
        [output] = llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
        assert output.error is None
    drawn = dict(module._random_weights(AutoConfig.from_pretrained(tmp_path), 0))
    info = read_checkpoint(file).tensors["model.embed_tokens.weight"]
    assert info.gguf is not None
    found, wanted = GGUFReader(file).numbers(info.gguf), drawn["model.embed_tokens.weight"].float()
    step = wanted.view(256, -1, 32).abs().amax(-1, keepdim=True) / 127
    bound = 0.51 * step * (kind == "Q8_0")
    assert ((found - wanted).view(256, -1, 32).abs() <= bound).all()


def test_a_file_takes_turns_with_itself_in_other_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when the file is not quantized, or figures of two formats share a name."""
    config = json.loads((ROOT / "benchmarks/models/lfm2-1.2b/config.json").read_text())
    config |= {"vocab_size": 20_224} | SHRUNK["lfm2-1.2b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    record = tmp_path / "record.json"
    command = ["gguf_cpu.py", "--shapes", str(tmp_path), "--work-dir", str(tmp_path)]
    command += ["--types", "Q8_0", "--quantization", "int8", "--outputs", "4", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--threads", "1", "--output", str(record)])
    importlib.import_module("benchmarks.peers.gguf_cpu").main()
    found = json.loads(record.read_text())
    name = f"{tmp_path.name}-Q8_0.gguf"
    settings = found["workload"]["engines"][name]
    assert list(settings) == ["quire", "quire, int8"]
    assert settings["quire, int8"]["quantization"] == "int8"
    assert "quantization" not in settings["quire"]
    rates = [f"{name}, {title}: decode, 4 streams, tokens/s" for title in settings]
    assert all(found["figures"][rate]["median"] > 0 for rate in rates)


def test_a_shape_without_a_name_in_files_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    module = importlib.import_module("benchmarks.peers.engines.random_gguf")
    with pytest.raises(ValueError, match="model_type 'qwen3' is not one of lfm2"):
        module.write_random_gguf(tiny_model, tmp_path / "model.gguf", "BF16", 0)
    assert not (tmp_path / "model.gguf").exists()

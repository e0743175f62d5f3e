"""Settings: the values that are refused, and the help of the sentence."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
import torch
from tools import memory_table
from tools.settings_reference import REFERENCE, render_reference

from quire.base.errors import ConfigError
from quire.bundled import bundled_model_path
from quire.config.memory.amounts import parse_bytes, parse_count
from quire.config.resolved import ResolvedScheduler, ResolvedSettings
from quire.config.settings import SECTIONS, EngineSettings, setting_fields
from quire.config.startup import find_model
from quire.entrypoints.cli.flags.fields import add_field_flags


def test_unknown_name_is_an_error_that_names_the_nearest() -> None:
    """A dropped misspelling would silently run with the default."""
    with pytest.raises(ConfigError, match=r"no setting max_num_seq .*Did you mean max_num_seqs\?"):
        EngineSettings.from_options({"max_num_seq": 8})
    with pytest.raises(ConfigError, match=r"Use one of: .*block_size"):
        EngineSettings.from_options({"zzzzzzzz": 8})


def test_names_of_vllm_are_understood_or_explained() -> None:
    """Users bring their settings with them."""
    settings = EngineSettings.from_options(
        {"gpu_memory_utilization": 1, "kv_cache_memory_bytes": "1g", "generation_config": "vllm"}
    )
    assert settings.memory_utilization == 1.0
    assert settings.kv_cache_memory == 2**30
    assert settings.generation_config == "none"
    with pytest.raises(ConfigError, match="size=2 cannot be served: quire runs on one device"):
        EngineSettings.from_options({"pipeline_parallel_size": 2})


@pytest.mark.parametrize(
    "given",
    [
        {"trust_remote_code": True},
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "enable_lora": False},
        {"enable_chunked_prefill": True, "tokenizer_mode": "auto", "compilation_config": 0},
        {"speculative_config": None, "cpu_offload_gb": 0, "hf_overrides": {}, "task": "generate"},
        {"distributed_executor_backend": "mp", "runner": "generate", "disable_log_stats": True},
        {"limit_mm_per_prompt": {}, "max_seq_len_to_capture": 8192, "swap_space": None},
        {"rope_scaling": None, "max_logprobs": 20, "reasoning_parser": "", "max_lora_rank": 16},
        *({"runner": name} for name in ("auto", "generate", "pooling")),
        *({"convert": name} for name in ("auto", "none", "embed", "classify")),
        *({"task": name} for name in ("embed", "embedding", "score", "classify", "encode")),
    ],
    ids=str,
)
def test_a_value_that_asks_for_what_is_so_anyway_is_taken(given: dict[str, object]) -> None:
    assert EngineSettings.from_options(given) == EngineSettings()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enable_expert_parallel", True, "has whole experts anyway"),
        ("enable_expert_parallel", False, None),
        ("trust_remote_code", True, None),
    ],
)
def test_a_value_that_may_be_missed_is_told(
    caplog: pytest.LogCaptureFixture, name: str, value: object, words: str | None
) -> None:
    """Fault: a user who asks for images, or for experts on ranks of their own, hears nothing."""
    assert EngineSettings.from_options({name: value}) == EngineSettings()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == (words is not None) and all(str(words) in text for text in told)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enable_chunked_prefill", False, "always computed in chunks; leave it out"),
        ("async_scheduling", False, "set depth to 1"),
        ("enable_prompt_adapter", True, "adapters are LoRA of language models"),
        ("tokenizer_mode", "mistral", "one kind of tokenizer"),
        ("cpu_offload_gb", 4, "have one place"),
        ("rope_scaling", {"factor": 2}, "give it in hf_overrides"),
        ("hf_overrides", str, "functions can't be"),
        ("hf_overrides", "[1]", "an object such as"),
        ("runner", "draft", "gives vectors, scores and classes"),
        ("task", "transcription", "gives vectors, scores and classes"),
        ("pooler_config", {"pooling_type": "CLS"}, "in PoolingParams(pooling="),
    ],
)
def test_a_value_that_asks_for_more_is_explained(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineSettings.from_options({name: value})
    assert words in str(caught.value) and name in str(caught.value)


def test_only_near_names_are_suggested() -> None:
    """Fault: `distributed_backend` was answered with attention_backend."""
    with pytest.raises(ConfigError, match=r"Did you mean distributed_executor_backend\?"):
        EngineSettings.from_options({"distributed_backend": "mp"})
    for name in ("kernel_backend", "tensor_size"):
        with pytest.raises(ConfigError, match="Use one of"):
            EngineSettings.from_options({name: "mp"})


def test_overrides_of_a_config_are_read() -> None:
    settings = EngineSettings.from_options({"hf_overrides": {"b": 1, "a": None}})
    assert settings.hf_overrides == '{"a": null, "b": 1}'
    assert EngineSettings.from_options({"hf_overrides": ' {"b":1,"a":null}'}) == settings
    model = str(bundled_model_path())
    for length in (512, 2048):
        changed = {"max_position_embeddings": length}
        options = {"model": model, "hf_overrides": changed}
        assert find_model(EngineSettings.from_options(options)).spec.max_context == length
    options = {"model": model, "hf_overrides": {"hidden_act": "cubic"}}
    with pytest.raises(ConfigError, match="with hf_overrides: hidden_act='cubic'"):
        find_model(EngineSettings.from_options(options))


def test_torchs_own_dtypes_and_devices_are_understood() -> None:
    """Scripts for other engines pass them."""
    given = {"dtype": torch.float16, "device": torch.device("cpu")}
    assert EngineSettings.from_options(given) == EngineSettings(dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match="dtype cannot be 'int32'"):
        EngineSettings.from_options({"dtype": torch.int32})


def test_a_value_of_another_type_is_answered_with_the_choices() -> None:
    """Whoever asks for 8 bits as a number learns what they are called."""
    with pytest.raises(ConfigError, match=r"quantization cannot be 8\. Give one of: int8, int4"):
        EngineSettings.from_options({"quantization": 8})


def test_a_number_beyond_any_is_answered_with_both_bounds() -> None:
    with pytest.raises(ConfigError, match="Give an integer from 1 to 9223372036854775807"):
        EngineSettings.from_options({"num_threads": 2**63})
    with pytest.raises(ConfigError, match="Give an integer of at least 1"):
        EngineSettings.from_options({"num_threads": 0})


def test_alias_and_name_together_are_refused() -> None:
    """Whichever came last would win otherwise."""
    both = {"gpu_memory_utilization": 0.5, "memory_utilization": 0.6}
    with pytest.raises(ConfigError, match="are one setting; give it once"):
        EngineSettings.from_options(both)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_seqs", "many", "a number such as"),
        ("max_num_seqs", True, "an integer"),
        ("max_num_seqs", 2.5, "an integer"),
        ("max_model_len", 1, "at least 2"),
        ("max_model_len", "long", "4096 or 32k"),
        ("block_size", 5000, "from 1 to 4096"),
        ("depth", 0, "from 1 to 16"),
        ("dtype", "int8", "one of: auto, bfloat16"),
        ("device", "cuda:1", "one of: auto, cpu, cuda; CUDA_VISIBLE_DEVICES"),
        ("load_format", "gguf", "one of: auto, safetensors, dummy"),
        ("scheduling_policy", "random", "one of: fcfs, priority, srtf, two_level, fair, or"),
        ("scheduling_policy", "a b:C", "package.module:Class"),
        ("priority_ageing_s", 0, "above 0"),
        ("max_num_partial_prefills", 0, "at least 1"),
        ("memory_utilization", 1.5, "at most 1"),
        ("memory_utilization", 0.0, "above 0"),
        ("memory_utilization", float("nan"), "a number"),
        ("kv_cache_memory", "4 parsecs", "4GiB"),
        ("kv_cache_memory", -1, "at least 1"),
        ("enable_prefix_caching", "yes", "True or False"),
        ("quiet", 1, "True or False"),
        ("model", 7, "text"),
        ("seed", "0", "an integer"),
    ],
)
def test_bad_value_names_setting_value_and_what_may_be(
    name: str, value: object, allowed: str
) -> None:
    """A value that slips through fails later, far from its cause."""
    with pytest.raises(ConfigError) as caught:
        EngineSettings.from_options({name: value})
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert allowed in message


def test_none_means_unset_even_where_there_is_a_default() -> None:
    """Programs pass optional values through."""
    nothing = {item.name: None for item in setting_fields()}
    assert EngineSettings.from_options(nothing) == EngineSettings()


def test_sizes_as_text_and_automatic_length() -> None:
    settings = EngineSettings.from_options({"max_model_len": "32k", "model": Path("a") / "b"})
    assert settings.max_model_len == 32000
    assert settings.model == str(Path("a") / "b")
    for automatic in (-1, "auto", "-1"):
        assert EngineSettings.from_options({"max_model_len": automatic}).max_model_len is None


def test_names_of_dtypes_that_vllm_users_know() -> None:
    for given, meant in (("half", "float16"), ("float", "float32")):
        assert EngineSettings.from_options({"dtype": given}).dtype == meant


def test_numbers_of_sequences_and_blocks_may_be_text() -> None:
    settings = EngineSettings.from_options({"max_num_seqs": "1k", "num_kv_blocks": "2K"})
    assert (settings.max_num_seqs, settings.num_kv_blocks) == (1000, 2048)


def test_pool_is_sized_once() -> None:
    """With two sizes, the order of checks would decide which one holds."""
    with pytest.raises(ConfigError, match="both size the KV cache"):
        EngineSettings(kv_cache_memory=2**20, num_kv_blocks=7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("4GiB", 4 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("3g", 3 * 2**30),
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_parse_count_tells_decimal_from_binary_thousands() -> None:
    assert (parse_count("8k"), parse_count("8K"), parse_count("12")) == (8000, 8192, 12)


@pytest.mark.parametrize("text", ["", "-1", "1e3", "GiB", "1 2"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        parse_bytes(text)


def test_every_setting_has_a_help_text() -> None:
    """The command line and the docs are made from it."""
    assert all(item.metadata["help"] for item in setting_fields())


def test_a_setting_is_declared_in_one_section() -> None:
    declared = [item.name for section in SECTIONS.values() for item in fields(section)]
    assert sorted(declared) == sorted(set(declared))
    assert [item.name for item in setting_fields()] == declared


def test_a_new_setting_needs_nothing_but_its_declaration() -> None:
    """It reaches the flags, and whoever takes its section, under its name."""

    @dataclass(frozen=True, kw_only=True)
    class WithToy(EngineSettings):
        toy_share: float = field(default=0.5, metadata={"help": "a share that only a test has"})

    @dataclass(frozen=True, kw_only=True)
    class ResolvedToy(ResolvedSettings):
        toy_share: float = 0.5

    settings = WithToy.from_options({"toy_share": 1})
    resolved = ResolvedToy.of(
        settings, max_model_len=8, kv_cache_dtype="float32", block_size=4, num_kv_blocks=2,
        max_num_seqs=3, max_num_batched_tokens=4, device="cpu", num_threads=1, dtype="float32",
    )  # fmt: skip
    assert isinstance(resolved, ResolvedScheduler)
    assert (resolved.toy_share, resolved.max_num_seqs) == (1.0, 3)
    parser = argparse.ArgumentParser()
    add_field_flags(parser, fields(WithToy), "")
    assert vars(parser.parse_args(["--toy-share", "0.25"])) == {"toy_share": 0.25}


def test_what_resolve_forgets_to_choose_is_missed_at_once() -> None:
    """A narrowed field has no default: the open value of its section must not pass for one."""
    with pytest.raises(TypeError, match="max_num_seqs"):
        ResolvedScheduler(max_num_batched_tokens=4)  # type: ignore[call-arg]


def test_the_page_of_models_by_memory_is_what_plans_compute() -> None:
    page = memory_table.PAGE.read_text(encoding="utf-8")
    assert page == memory_table.render_page(), "run python -m tools.memory_table"


def test_the_settings_reference_is_up_to_date() -> None:
    assert REFERENCE.read_text() == render_reference(), "run python -m tools.settings_reference"

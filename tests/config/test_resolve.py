"""Resolution: choices with reasons, and plans that never promise more than there is."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import ConfigError
from quire.base.platform import Platform
from quire.config.kv_layout import KVFormat
from quire.config.render_plan import render_plan
from quire.config.resolve import Decision, Resolved, resolve
from quire.config.rope import LongRopeScaling
from quire.config.settings import EngineSettings
from tests.config.specs import GIB, make_gpu_platform, make_platform, make_spec
from tests.profiles import examples


def reason(plan: Resolved, name: str) -> str:
    return next(decision.reason for decision in plan.decisions if decision.name == name)


def test_nothing_is_left_open() -> None:
    plan = resolve(EngineSettings(), make_spec(), None, make_platform())
    open_values = {f.name for f in fields(plan.settings) if getattr(plan.settings, f.name) is None}
    unlimited = {name for name in open_values if name.endswith(("_threshold", "_prefills"))}
    # None is an answer in all of these
    chosen_later = {"attention_backend", "attention_isa", "linear_isa"}
    asked_only = {
        "model", "tokenizer", "chat_template", "revision", "download_dir", "kv_cache_memory",
        "memory_utilization", "swap_space", "hf_overrides", "speculative_config", "output_hook",
        "max_cpu_loras", "kv_disk", "limit_mm_per_prompt", "allowed_local_media_path",
        "allowed_media_domains", "kv_events_config", "mmproj", "mm_processor_kwargs",
    }  # fmt: skip
    assert open_values == unlimited | chosen_later | asked_only | {"quantization"}
    assert all(decision.reason for decision in plan.decisions)


def test_float16_becomes_bfloat16_where_the_cpu_has_no_float16() -> None:
    """float16 without instructions is emulated, many times slower."""
    spec = make_spec(dtype="float16")
    plain = resolve(EngineSettings(), spec, None, make_platform())
    assert (plain.settings.dtype, plain.spec.dtype) == ("bfloat16", "bfloat16")
    assert "float16" in reason(plain, "dtype")
    native = resolve(EngineSettings(), spec, None, make_platform(features=["avx512_fp16"]))
    assert native.settings.dtype == "float16"
    asked = resolve(EngineSettings(dtype="float16"), spec, None, make_platform())
    assert asked.settings.dtype == "float16"


@pytest.mark.parametrize(
    ("context", "value", "words"),
    [
        (2048, "short factors", "no sequence is longer than the 2,048 tokens of the training"),
        (2049, "long factors", "of short prompts too; max_model_len=2048 gives those"),
        (None, "long factors", "of short prompts too; max_model_len=2048 gives those"),
    ],
)
def test_the_plan_says_which_factors_of_longrope_count(
    context: int | None, value: str, words: str
) -> None:
    """Fault: short prompts differ from transformers, and nothing tells why."""
    scaling = LongRopeScaling((1.0,) * 32, (2.0,) * 32, 2048, 1.2)
    plain = make_spec()
    spec = replace(plain, ropes=tuple(replace(rope, scaling=scaling) for rope in plain.ropes))
    plan = resolve(EngineSettings(max_model_len=context), spec, None, make_platform())
    decision = next(each for each in plan.decisions if each.name == "longrope")
    assert decision.value == value and words in decision.reason
    others = resolve(EngineSettings(max_model_len=context), plain, None, make_platform())
    assert "longrope" not in {each.name for each in others.decisions}


def test_cache_follows_the_model_unless_told() -> None:
    """The size of a page must be that of the dtype that the pool has."""
    spec = make_spec(dtype="float32")
    same = resolve(EngineSettings(), spec, None, make_platform())
    half = resolve(EngineSettings(kv_cache_dtype="bfloat16"), spec, None, make_platform())
    assert same.settings.kv_cache_dtype == "float32"
    assert half.layout.page_bytes * 2 == same.layout.page_bytes
    assert half.memory.kv_per_token * 2 == same.memory.kv_per_token


def test_an_int8_cache_counts_its_scales() -> None:
    """Pages that leave no room for scales would overlap."""
    spec = make_spec(dtype="bfloat16")
    full = resolve(EngineSettings(), spec, None, make_platform())
    small = resolve(EngineSettings(kv_cache_dtype="int8"), spec, None, make_platform())
    heads = 2 * spec.num_layers * spec.num_kv_heads
    assert full.memory.kv_per_token == heads * spec.head_dim * 2
    assert small.memory.kv_per_token == heads * (spec.head_dim + 4)
    assert KVFormat.plain(3, 5, "int8").token_bytes == 16 + 3 * 4
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*int4.*int8.*fp8"):
        EngineSettings(kv_cache_dtype="int4")


def test_a_step_has_a_token_for_every_sequence() -> None:
    """A running sequence without a token in a step starves."""
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=4 .* max_num_seqs=8"):
        resolve(
            EngineSettings(max_num_batched_tokens=4, max_num_seqs=8), make_spec(), None,
            make_platform(),
        )  # fmt: skip
    few = resolve(EngineSettings(max_num_batched_tokens=4), make_spec(), None, make_platform())
    assert few.settings.max_num_seqs == 4
    many = resolve(EngineSettings(max_num_seqs=5000), make_spec(), None, make_platform(64 * GIB))
    assert many.settings.max_num_batched_tokens == 5000


def test_large_models_take_shorter_steps() -> None:
    """A step of a large model on two cores would hold up all other requests for many seconds."""
    small = resolve(EngineSettings(), make_spec(num_parameters=10**6), None, make_platform())
    large = resolve(EngineSettings(), make_spec(num_parameters=10**9), None, make_platform())
    assert small.settings.max_num_batched_tokens == 2048
    assert large.settings.max_num_batched_tokens == 256


def test_tile_registers_take_longer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tile registers compute several times as fast, but only in formats that they take, and where
    kernels use them."""
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)

    def step_tokens(
        dtype: str,
        quantization: str | None,
        *features: str,
        refused: bool = False,
        linear_isa: str | None = None,
        kernels: tuple[str, ...] | None = None,
        **more: Any,
    ) -> int:
        spec = make_spec(num_parameters=5 * 10**8, dtype=dtype)
        more |= {"dtype": dtype, "quantization": quantization, "linear_isa": linear_isa}
        settings = EngineSettings(**more)
        platform = make_platform(features=features)
        cpu = replace(platform.cpu, tiles_refused=refused)
        platform = replace(platform, cpu=cpu, kernels=kernels)
        return resolve(settings, spec, None, platform).settings.max_num_batched_tokens

    amx = ("amx_tile", "amx_bf16", "amx_int8")
    assert step_tokens("bfloat16", None, *amx) == 512
    assert step_tokens("bfloat16", None, "avx512f") == 256
    assert step_tokens("bfloat16", None, *amx, refused=True) == 256
    assert step_tokens("float32", None, *amx) == 256
    assert step_tokens("float32", "int8", *amx) == 512
    assert step_tokens("float32", "int8", *amx, activation_bits=16) == 256
    assert step_tokens("bfloat16", "int8", *amx, activation_bits=16) == 512
    assert step_tokens("bfloat16", None, *amx, linear_isa="avx512_vnni") == 256
    assert step_tokens("bfloat16", "int8", *amx, linear_isa="avx512_vnni") == 512
    for compiled, tokens in ((("amx", "avx2"), 512), (("avx2",), 256), ((), 256)):
        assert step_tokens("bfloat16", None, *amx, kernels=compiled) == tokens
        assert step_tokens("bfloat16", "int8", *amx, kernels=compiled) == tokens
    for isa, tokens in (("amx", 512), ("avx512_bf16", 256), ("none", 256)):
        monkeypatch.setenv("QUIRE_CPU_ISA", isa)
        assert step_tokens("bfloat16", None, *amx) == tokens


def test_activation_bits_are_those_of_products() -> None:
    """Turns red when a plan or a receipt states bits with which nothing is multiplied, or a setting
    is taken that has no effect."""
    spec = make_spec()

    def bits(platform: Platform | None = None, **asked: Any) -> tuple[int, list[str]]:
        plan = resolve(EngineSettings(**asked), spec, None, platform or make_platform())
        told = [each.reason for each in plan.decisions if each.name == "activation_bits"]
        return plan.settings.activation_bits, told

    assert bits() == (16, [])
    assert bits(activation_bits=16) == (16, [])
    eight, [why] = bits(quantization="int8")
    assert eight == 8 and "16 keeps activations" in why
    assert bits(quantization="int8", activation_bits=8) == (8, ["as asked"])
    wide, [why] = bits(quantization="int4", activation_bits=16)
    assert wide == 16 and "as asked; integers become bfloat16" in why
    with pytest.raises(ConfigError, match=r"activation_bits=8: no matrix .*quantization='int8'"):
        bits(activation_bits=8)
    with pytest.raises(ConfigError, match=r"activation_bits=16 on cuda: .*device='cpu'"):
        bits(make_gpu_platform(), quantization="int8", activation_bits=16)
    assert bits(make_gpu_platform(), quantization="int8")[0] == 8


def test_kernels_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a core does not take the kernels that it was handed, or the plan does not say
    which they are."""
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)

    def isas(platform: Platform, **given: str) -> tuple[list[str | None], dict[str, str]]:
        plan = resolve(EngineSettings(**given), make_spec(), None, platform)
        told = {each.name: each.value for each in plan.decisions if each.name.endswith("_isa")}
        return [plan.settings.linear_isa, plan.settings.attention_isa], told

    cpu, both = make_platform(), {"linear_isa": "avx2", "attention_isa": "avx512"}
    assert isas(cpu) == ([None, None], {"linear_isa": "auto", "attention_isa": "auto"})
    assert isas(cpu, **both) == (["avx2", "avx512"], both)
    backend = {**both, "attention_backend": "reference"}
    assert isas(cpu, **backend) == (["avx2", None], {"linear_isa": "avx2"})
    assert isas(make_gpu_platform(), **both) == ([None, None], {})
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx512")
    forced = dict.fromkeys(both, "avx512")
    assert isas(cpu, **both) == ([None, None], forced)


def test_context_is_shortened_with_a_reason_when_it_does_not_fit() -> None:
    """The peer refuses to start; here it starts within the memory."""
    spec = make_spec(max_context=10**6)
    plan = resolve(EngineSettings(kv_cache_memory=64 * 2**20), spec, None, make_platform())
    assert plan.settings.max_model_len == 64 * 2**20 // plan.memory.kv_per_token
    assert "1,000,000" in reason(plan, "max_model_len")


def test_context_beyond_the_model() -> None:
    """Learned positions end; rotary ones only get worse."""
    wanted = EngineSettings(max_model_len=8192)
    with pytest.raises(ConfigError, match="at most max_model_len=4096"):
        resolve(wanted, make_spec(learned_positions=True), None, make_platform())
    plan = resolve(wanted, make_spec(), None, make_platform())
    assert plan.settings.max_model_len == 8192
    assert "beyond" in reason(plan, "max_model_len")


def test_a_model_larger_than_the_memory_is_refused_before_loading() -> None:
    spec = make_spec(num_parameters=10**10)
    with pytest.raises(ConfigError, match=r"weights of 18\.6 GiB.*smaller model"):
        resolve(EngineSettings(), spec, None, make_platform(8 * GIB))


def test_a_pool_larger_than_the_memory_names_the_largest() -> None:
    """The named value must work when it is given."""
    wanted, spec, platform = EngineSettings(num_kv_blocks=10**7), make_spec(), make_platform()
    with pytest.raises(ConfigError, match="at most num_kv_blocks=") as caught:
        resolve(wanted, spec, None, platform)
    most = int(re.findall(r"num_kv_blocks=(\d+)", str(caught.value))[-1])
    full = EngineSettings(num_kv_blocks=most, max_model_len=spec.max_context)
    assert resolve(full, spec, None, platform).settings.num_kv_blocks == most
    with pytest.raises(ConfigError, match=f"at most num_kv_blocks={most}"):
        resolve(replace(full, num_kv_blocks=most + 1), spec, None, platform)
    with pytest.raises(ConfigError, match=r"at most kv_cache_memory=\d+KiB") as caught:
        resolve(EngineSettings(kv_cache_memory=GIB * 99), spec, None, platform)
    size = re.findall(r"kv_cache_memory=(\d+KiB)", str(caught.value))[-1]
    plan = resolve(EngineSettings.from_options({"kv_cache_memory": size}), spec, None, platform)
    assert plan.settings.max_model_len == spec.max_context


def test_a_pool_too_small_for_any_request() -> None:
    with pytest.raises(ConfigError, match="too few for any request"):
        resolve(EngineSettings(kv_cache_memory=10), make_spec(), None, make_platform())


def test_the_plan_says_what_a_disk_holds() -> None:
    settings = EngineSettings(kv_disk="/kv", kv_disk_bytes=10**9)
    plan = resolve(settings, make_spec(), None, make_platform())
    assert "tokens in /kv; a hit of 1,024 reads" in reason(plan, "kv_disk")


def test_default_pool_leaves_memory_to_others_but_holds_one_context() -> None:
    """An idle laptop must not lose all its memory; a model must still get its context."""
    spec = make_spec(num_layers=32, num_kv_heads=8, head_dim=128, max_context=2048)
    plan = resolve(EngineSettings(), spec, None, make_platform(8 * GIB))
    left = (plan.memory.budget or 0) - plan.memory.fixed.total
    assert plan.memory.kv_cache <= left / 2
    long = resolve(EngineSettings(), replace(spec, max_context=40000), None, make_platform(8 * GIB))
    assert left / 2 < long.memory.kv_cache <= left
    assert long.settings.max_model_len == 40000
    all_of_it = resolve(EngineSettings(memory_utilization=0.9), spec, None, make_platform(8 * GIB))
    assert left - plan.layout.page_bytes < all_of_it.memory.kv_cache <= left


def test_checkpoints_of_large_states_leave_memory_to_the_rest() -> None:
    """Qwen3.5-9B keeps 49 MiB for a prefix: four for each row would be all that there is."""
    small = replace(make_spec(), states=(64, 0, 0, 0))
    plan = resolve(EngineSettings(max_num_seqs=16), small, None, make_platform(8 * GIB))
    assert plan.settings.num_state_checkpoints == 64
    large = replace(small, wide_states=(4_000_000, 0, 0, 0))
    plan = resolve(EngineSettings(max_num_seqs=16), large, None, make_platform(8 * GIB))
    room = (plan.memory.budget or 0) - plan.memory.fixed.weights
    count = plan.settings.num_state_checkpoints
    assert count == room // 8 // plan.layout.state_bytes
    assert 8 < count < 64
    asked = EngineSettings(max_num_seqs=16, num_state_checkpoints=70)
    chosen = resolve(asked, large, None, make_platform(8 * GIB)).settings
    assert chosen.num_state_checkpoints == 70


def test_rows_with_large_states_leave_memory_to_the_rest() -> None:
    """64 rows of Qwen3.5-0.8B have 2.4 GiB of states, whatever the machine has."""
    spec = replace(make_spec(), states=(64, 0, 0, 0), wide_states=(4_000_000, 0, 0, 0))
    small, large = (resolve(EngineSettings(), spec, None, make_platform(n * GIB)) for n in (4, 200))
    room = (small.memory.budget or 0) - small.memory.fixed.weights
    rows = small.settings.max_num_seqs
    assert rows == room // 4 // (2 * small.layout.state_bytes) < large.settings.max_num_seqs
    assert "take a quarter of" in reason(small, "max_num_seqs")
    assert "quarter" not in reason(large, "max_num_seqs")
    assert resolve(EngineSettings(max_num_seqs=rows + 3), spec, None, make_platform(4 * GIB))
    with pytest.raises(ConfigError, match=r"states of 30\.. MiB a row do not fit.*at most \d+"):
        resolve(EngineSettings(max_num_seqs=500), spec, None, make_platform(4 * GIB))


def test_kept_inputs_of_drafts_are_in_the_plan() -> None:
    spec = replace(make_spec(), states=(64, 0, 0, 0))
    settings = EngineSettings(max_num_seqs=8, num_state_checkpoints=0)
    plain = resolve(settings, spec, None, make_platform(8 * GIB))
    keeping = resolve(settings, replace(spec, state_inputs=100), None, make_platform(8 * GIB))
    more = keeping.memory.fixed.states - plain.memory.fixed.states
    assert more == (8 + 16) * 100 * spec.dtype_bytes
    assert "24 tokens of drafts" in render_plan(keeping)


def test_unknown_memory_still_starts() -> None:
    """Not every system says what is free."""
    plan = resolve(EngineSettings(), make_spec(), None, make_platform(0))
    assert plan.memory.budget is None
    assert 0 < plan.memory.kv_cache <= GIB
    assert "does not say" in render_plan(plan)


def test_plan_is_a_short_aligned_block() -> None:
    plan = resolve(
        EngineSettings(), make_spec(windows=[512, None, 512, None]), None, make_platform()
    )
    extra = [Decision("attention", "cpu", "best that serves here")]
    lines = render_plan(plan, extra).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 120
    assert any("attention" in line and "best that serves here" in line for line in lines)
    starts = {
        line.index(d.reason) for d in plan.decisions for line in lines[1:9] if d.reason in line
    }
    assert len(starts) == 1


windows = st.sampled_from([None, [64, None, 64, None], [32] * 4, [16, 16, 16, None]])
machines = st.integers(0, 10).map(lambda quarter: 700 * 2**20 + quarter * 300 * 2**20)


@given(
    windows=windows,
    free=machines,
    max_context=st.integers(2, 200_000),
    block_size=st.sampled_from([1, 7, 16, 256]),
    max_num_seqs=st.integers(1, 300),
    pool=st.one_of(st.none(), st.integers(1, 5000)),
    share=st.one_of(st.none(), st.floats(0.5, 1.0)),
    asked=st.one_of(st.none(), st.integers(2, 200_000)),
)
@examples(150)
def test_a_plan_fits_the_machine_and_its_context_fits_the_plan(
    windows: list[int | None] | None,
    free: int,
    max_context: int,
    block_size: int,
    max_num_seqs: int,
    pool: int | None,
    share: float | None,
    asked: int | None,
) -> None:
    """Whatever is asked: either one sentence, or an engine that fits and can serve its context.
    The length that an error names fits, and one block more does not."""
    spec = make_spec(windows=windows, max_context=max_context)
    wanted = EngineSettings(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        num_kv_blocks=pool,
        memory_utilization=share,
        max_model_len=asked,
    )
    platform = make_platform(free)
    try:
        plan = resolve(wanted, spec, None, platform)
    except ConfigError as error:
        named = re.search(r"at most max_model_len=(\d+)", str(error))
        if named is not None:
            longest = int(named[1])
            resolve(replace(wanted, max_model_len=longest), spec, None, platform)
            with pytest.raises(ConfigError, match="does not fit"):
                longer = replace(wanted, max_model_len=longest + block_size)
                resolve(longer, spec, None, platform)
        return
    memory, chosen = plan.memory, plan.settings
    assert memory.budget is not None
    assert memory.total <= memory.budget <= free
    needed = plan.layout.most_blocks(chosen.max_model_len, chosen.max_num_batched_tokens)
    assert needed <= chosen.num_kv_blocks
    assert chosen.max_model_len <= memory.longest_context
    assert memory.max_concurrency >= 1.0
    if asked is None:
        assert chosen.max_model_len <= max_context
        assert plan == resolve(wanted, spec, None, platform)


@pytest.mark.parametrize(
    ("given", "threshold"),
    [
        ({}, None),
        ({"long_prefill_token_threshold": 0}, None),
        ({"long_prefill_token_threshold": 300}, 300),
        ({"max_num_partial_prefills": 1}, None),
        ({"max_num_partial_prefills": 4}, 40),
        ({"max_long_partial_prefills": 1}, 40),
        ({"max_num_partial_prefills": 4, "long_prefill_token_threshold": 64}, 64),
    ],
)
def test_prompts_side_by_side_share_steps(given: dict[str, int], threshold: int | None) -> None:
    """4 % of the context, as vLLM chooses; without it the first prompt would take whole steps."""
    settings = EngineSettings(max_model_len=1000, **given)
    plan = resolve(settings, make_spec(), None, make_platform())
    assert plan.settings.long_prefill_token_threshold == threshold

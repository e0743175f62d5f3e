"""Public names, arguments and attributes of vLLM's documented Python API: each works here, or a
sentence explains."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import quire
from quire import LLM, AsyncLLM, EngineArgs, SamplingParams
from quire.sampling_params import RequestOutputKind, StructuredOutputsParams

MODEL = {"quiet": True, "num_kv_blocks": 256, "max_model_len": 512}

IMPORTS = """
quire: PoolingParams PoolingOutput PoolingRequestOutput EmbeddingRequestOutput EmbeddingOutput
quire: ClassificationRequestOutput ClassificationOutput ScoringRequestOutput ScoringOutput
quire: LLM SamplingParams BeamSearchParams RequestOutput CompletionOutput TextPrompt TokensPrompt
quire: PromptType EngineArgs AsyncEngineArgs LLMEngine AsyncLLMEngine AsyncLLM __version__
quire.sampling_params: SamplingParams BeamSearchParams RequestOutputKind LogitsProcessor
quire.sampling_params: StructuredOutputsParams
quire.outputs: PoolingRequestOutput PoolingOutput
quire.outputs: RequestOutput CompletionOutput BeamSearchOutput BeamSearchSequence RequestMetrics
quire.inputs: TextPrompt TokensPrompt PromptType
"""
MISSING_IMPORTS = """
quire: ModelRegistry RewardRequestOutput initialize_ray_cluster
quire.sampling_params: GuidedDecodingParams SamplingType
quire.outputs: RewardRequestOutput
quire.inputs: DataPrompt EmbedsPrompt MultiModalDataDict
"""

SAMPLING = """
n=2  temperature=0  top_p=0.9  top_k=-1  min_p=0.1  seed=1  presence_penalty=0.1
frequency_penalty=0.1  repetition_penalty=1.1  stop=["a"]  stop_token_ids=[1]  bad_words=["x"]
include_stop_str_in_output=True  ignore_eos=True  max_tokens=None  min_tokens=2  logprobs=2
prompt_logprobs=1  detokenize=False  skip_special_tokens=False  logit_bias={1:1.0}
spaces_between_special_tokens=False  truncate_prompt_tokens=4  allowed_token_ids=[1]
output_kind=RequestOutputKind.DELTA  best_of=None  structured_outputs=None  guided_decoding=None
extra_args=None  extra_args={}  use_beam_search=False  length_penalty=1.0  early_stopping=False
structured_outputs=StructuredOutputsParams(regex="a+")  skip_clone=True
logits_processors=None  flat_logprobs=False  skip_reading_prefix_cache=None
thinking_token_budget=None
"""
SAMPLING_EXPLAINED = """
best_of=4  structured_outputs=str  structured_outputs=object()  guided_decoding=object()
extra_args={"a":1}
use_beam_search=True  flat_logprobs=True  thinking_token_budget=5  max_token=4  temprature=1
"""

SETTINGS = """
tokenizer=None  tokenizer_mode="auto"  skip_tokenizer_init=False  trust_remote_code=True
allowed_local_media_path=""  tensor_parallel_size=1  dtype="auto"  quantization=None  revision=None
tokenizer_revision=None  seed=0  gpu_memory_utilization=0.9  swap_space=0  cpu_offload_gb=0
enforce_eager=False  disable_custom_all_reduce=True  hf_token=None  hf_overrides=None
mm_processor_kwargs=None  pooler_config=None  structured_outputs_config=None
kv_cache_memory_bytes="64MiB"  compilation_config=0  logits_processors=None  runner="pooling"
convert="embed"  task="embed"  max_seq_len_to_capture=8192
enable_chunked_prefill=True  enable_lora=False
speculative_config=None  distributed_executor_backend="mp"  disable_log_stats=True
limit_mm_per_prompt={"image":0}  enable_prefix_caching=True  block_size=16  max_num_seqs=4
max_num_batched_tokens=256  load_format="auto"  download_dir=None  served_model_name="me"
pipeline_parallel_size=1  data_parallel_size=1  kv_cache_dtype="auto"  device="auto"
generation_config="auto"  override_generation_config=None  enable_sleep_mode=True
scheduling_policy="fcfs"  async_scheduling=True  model_impl="auto"  max_logprobs=20
attention_backend=None  long_prefill_token_threshold=0  kv_transfer_config=None
max_num_partial_prefills=1  num_gpu_blocks_override=None  calculate_kv_scales=False
"""
SETTINGS_EXPLAINED = """
nnodes=2  enable_prompt_adapter=True  cpu_offload_gb=4
speculative_config={"method":"mtp","model":"x"}
enable_chunked_prefill=False  runner="draft"  pooler_config={"pooling_type":"CLS"}
kv_transfer_config={"a":1}  rope_theta=1e6
structured_outputs_config={"backend":"xgrammar"}  worker_cls="a.B"
pipeline_parallel_size=2  override_generation_config={"a":1}  max_lenght=5  model_len=5
"""

CALLS = """
llm.generate("a", sp)
llm.generate(["a", "b"], [sp, sp], use_tqdm=False)
llm.generate("a", sp, False, lora_request=None, priority=[0])
llm.generate("a", sp, tokenization_kwargs=None, guided_options_request=None)
llm.generate(TokensPrompt(prompt_token_ids=[5, 6]), sp)
llm.generate(TextPrompt(prompt="a"), sp)
llm.generate({"prompt": "a", "cache_salt": "me", "multi_modal_data": None}, sp)
llm.generate({"prompt_token_ids": [5, 6], "multi_modal_data": {}, "mm_processor_kwargs": None}, sp)
llm.chat([{"role": "user", "content": "a"}], sp, False)
llm.chat([{"role": "user", "content": "a"}], sp, lora_request=None, mm_processor_kwargs=None)
llm.chat([{"role": "user", "content": "a"}], sp, chat_template="{{ messages[0].content }}")
llm.chat([{"role": "user", "content": "a"}], sp, chat_template_content_format="string")
llm.chat([{"role": "user", "content": "a"}], sp, add_generation_prompt=True, tools=None)
llm.chat(said, sp, add_generation_prompt=False, continue_final_message=True)
llm.chat([{"role": "user", "content": "a"}], sp, chat_template_kwargs={"enable_thinking": False})
llm.beam_search(["a"], BeamSearchParams(beam_width=2, max_tokens=2), lora_request=None)
llm.beam_search([{"prompt": "a"}], BeamSearchParams(beam_width=2))[0].sequences[0].text
llm.get_default_sampling_params().clone()
llm.enqueue(["a", "b"], sp, priority=None) and llm.wait_for_completion()
llm.wait_for_completion(use_tqdm=False)
llm.reset_prefix_cache()
llm.sleep(1) or llm.wake_up()
llm.get_metrics()[0].name
llm.llm_engine.has_unfinished_requests()
llm.llm_engine.get_num_unfinished_requests()
llm.llm_engine.get_tokenizer().eos_token_id
llm.llm_engine.abort_request(["none"])
out.request_id
out.prompt
out.prompt_token_ids
out.prompt_logprobs
out.finished
out.metrics.arrival_time
out.metrics.first_token_time - out.metrics.arrival_time
out.metrics.first_token_latency
out.metrics.time_in_queue
out.lora_request
out.num_cached_tokens
out.outputs[0].index
out.outputs[0].text
out.outputs[0].token_ids
out.outputs[0].cumulative_logprob
out.outputs[0].logprobs
out.outputs[0].finish_reason
out.outputs[0].stop_reason
tok.encode("a b")
tok.encode("a b", add_special_tokens=False)
tok("a b").input_ids
tok(["a", "b c"])["attention_mask"]
tok("a b", return_offsets_mapping=True)["offset_mapping"]
tok("a b", padding=False, truncation=True, max_length=1, return_tensors=None)
tok.decode([5, 6], skip_special_tokens=True)
tok.decode(5)
tok.batch_decode([[5], [6, 7]], skip_special_tokens=True)
tok.tokenize("a b")
tok.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
tok.apply_chat_template([{"role": "user", "content": "a"}])
tok.apply_chat_template([[{"role": "user", "content": "a"}]], return_dict=True)["input_ids"]
tok.eos_token + tok.bos_token
tok.eos_token_id + tok.bos_token_id
(tok.pad_token, tok.pad_token_id, tok.unk_token, tok.unk_token_id, tok.sep_token)
tok.all_special_ids
tok.all_special_tokens
tok.special_tokens_map
tok.vocab_size <= len(tok) == len(tok.get_vocab())
tok.get_added_vocab()
tok.convert_tokens_to_ids(tok.convert_ids_to_tokens([5, 6]))
tok.convert_tokens_to_string(["a", "b"])
tok.chat_template
tok.model_max_length
tok.is_fast
dataclasses.replace(sp, max_tokens=3)
sp.clone()
SamplingParams.from_optional(temperature=None, top_p=0.5)
EngineArgs(model="m", max_model_len=128, trust_remote_code=True).max_model_len
dataclasses.asdict(EngineArgs(model="m"))
EngineArgs.from_cli_args(EngineArgs.add_cli_args(parser).parse_args(["--seed", "3"])).seed
"""
CALLS_EXPLAINED = """
llm.classify("a")
llm.reward("a")
llm.collective_rpc("f")
llm.apply_model(print)
llm.model_config
llm.llm_engine.model_config
llm.llm_engine.add_lora(1)
llm.set_tokenizer(1)
llm.generate("a", sp, lora_request=object())
llm.generate("a", sp, tokenization_kwargs={"truncation": True})
llm.generate(prompts="a", prompt_token_ids=[[1]])
llm.generate(prompt_token_ids=[[1]], sampling_params=sp)
llm.generate(sampling_params=sp)
StructuredOutputsParams(regexp="a")
StructuredOutputsParams(regex="a", disable_additional_properties=True)
llm.generate("a", sp, no_such_argument=1)
llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}, sp)
llm.generate({"prompt_embeds": [1]}, sp)
llm.generate({"prompt": "a", "priority": 3}, sp)
llm.chat([{"role": "user", "content": "a"}], sp, mm_processor_kwargs={"a": 1})
tok("a", return_tensors="pt")
tok("a", padding="max_length")
tok.pad([1])
tok.save_pretrained("x")
tok.add_tokens(["x"])
setattr(sp, "max_tokens", 4)
EngineArgs(model="m").create_engine_config()
EngineArgs(model="m", pipeline_parallel_size=2)
"""


def lines(table: str) -> list[str]:
    return [line for line in table.splitlines() if line]


def names(table: str) -> list[tuple[str, str]]:
    rows = (line.partition(": ") for line in lines(table))
    return [(module, name) for module, _, found in rows for name in found.split()]


def arguments(table: str) -> list[str]:
    return [each for line in lines(table) for each in line.split("  ")]


def explains(error: BaseException) -> bool:
    """Return whether the message says more than that something is not there."""
    bare = r"(has no attribute '\w+'|unexpected keyword argument '\w+'|cannot import name .*)$"
    return len(str(error)) > 40 and not re.search(bare, str(error))


@pytest.fixture(scope="module")
def scope() -> Iterator[dict[str, Any]]:
    with LLM(**MODEL) as llm:
        sp = SamplingParams(max_tokens=2, temperature=0)
        (out,) = llm.generate("hello", sp)
        public = {name: getattr(quire, name) for name in quire.__all__}
        yield {
            **public, "llm": llm, "sp": sp, "out": out, "tok": llm.get_tokenizer(),
            "dataclasses": dataclasses, "parser": argparse.ArgumentParser(),
            "said": [{"role": "assistant", "content": "a"}],
        }  # fmt: skip


def test_there_are_enough() -> None:
    tables = (SAMPLING, SAMPLING_EXPLAINED, SETTINGS, SETTINGS_EXPLAINED)
    count = sum(len(arguments(table)) for table in tables)
    count += len(names(IMPORTS)) + len(names(MISSING_IMPORTS))
    assert count + len(lines(CALLS)) + len(lines(CALLS_EXPLAINED)) >= 200


@pytest.mark.parametrize(("module", "name"), names(IMPORTS))
def test_names_that_are_imported(module: str, name: str) -> None:
    exec(f"from {module} import {name}", {})


@pytest.mark.parametrize(("module", "name"), names(MISSING_IMPORTS))
def test_names_that_are_missing(module: str, name: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {name}", {})
    assert explains(caught.value) and name in str(caught.value)


@pytest.mark.parametrize("given", arguments(SAMPLING))
def test_sampling_parameters(given: str) -> None:
    kinds = (SamplingParams, RequestOutputKind, StructuredOutputsParams)
    scope = {kind.__name__: kind for kind in kinds}
    eval(f"SamplingParams({given})", scope)


@pytest.mark.parametrize("given", arguments(SAMPLING_EXPLAINED))
def test_sampling_parameters_that_are_explained(given: str) -> None:
    with pytest.raises(ValueError, match=given.partition("=")[0]) as caught:
        eval(f"SamplingParams({given})", {"SamplingParams": SamplingParams})
    assert explains(caught.value)


@pytest.mark.parametrize("given", arguments(SETTINGS))
def test_settings(given: str) -> None:
    eval(f"EngineArgs(model='m', {given})", {"EngineArgs": EngineArgs})


@pytest.mark.parametrize("given", arguments(SETTINGS_EXPLAINED))
def test_settings_that_are_explained(given: str) -> None:
    with pytest.raises(ValueError, match=given.partition("=")[0]) as caught:
        eval(f"EngineArgs(model='m', {given})", {"EngineArgs": EngineArgs})
    assert explains(caught.value)


@pytest.mark.parametrize("call", lines(CALLS))
def test_calls(scope: dict[str, Any], call: str) -> None:
    eval(call, scope)


@pytest.mark.parametrize("call", lines(CALLS_EXPLAINED))
def test_calls_that_are_explained(scope: dict[str, Any], call: str) -> None:
    with pytest.raises((ValueError, AttributeError)) as caught:
        eval(call, scope)
    assert explains(caught.value), caught.value


def test_settings_of_an_engine_pass_through_a_dict() -> None:
    args = EngineArgs(**MODEL, swap_space=1)
    with LLM(**dataclasses.asdict(args)) as llm:
        assert llm.engine.resolved.settings.swap_space == 2**30
    with LLM.from_engine_args(EngineArgs(**MODEL)) as llm:
        assert llm.engine.resolved.settings.max_model_len == 512


def test_an_engine_of_requests_by_id(scope: dict[str, Any]) -> None:
    engine = scope["llm"].llm_engine
    kinds = {
        "c": RequestOutputKind.CUMULATIVE, "d": RequestOutputKind.DELTA,
        "f": RequestOutputKind.FINAL_ONLY,
    }  # fmt: skip
    for request_id, kind in kinds.items():
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, output_kind=kind)
        assert engine.add_request(request_id, "hello", params) == request_id
    with pytest.raises(ValueError, match="'c' is open already"):
        engine.add_request("c", "hello", SamplingParams())
    engine.add_request("gone", "hello", SamplingParams(max_tokens=100))
    seen: dict[str, list[Any]] = {}
    engine.abort_request("gone")
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
    (final,) = seen["f"]
    assert final.finished and len(final.outputs[0].token_ids) == 5
    texts = [output.outputs[0].text for output in seen["c"]]
    assert texts[-1] == final.outputs[0].text and len(texts) == 5
    assert "".join(output.outputs[0].text for output in seen["d"]) == texts[-1]
    tokens = [token for output in seen["d"] for token in output.outputs[0].token_ids]
    assert tokens == final.outputs[0].token_ids
    assert not engine.get_num_unfinished_requests()


def test_a_stream_gives_what_its_output_kind_says(scope: dict[str, Any]) -> None:
    llm = scope["llm"]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (whole,) = llm.generate("hello", params)
    deltas = list(llm.stream("hello", params.clone(output_kind=RequestOutputKind.DELTA)))
    assert "".join(each.outputs[0].text for each in deltas) == whole.outputs[0].text
    assert len(deltas) > 2 and deltas[-1].finished
    (last,) = llm.stream("hello", params.clone(output_kind=RequestOutputKind.FINAL_ONLY))
    assert last.outputs[0].token_ids == whole.outputs[0].token_ids


def test_prompts_are_truncated_to_their_end(scope: dict[str, Any]) -> None:
    llm = scope["llm"]
    for length, left in ((3, 3), (100, 8), (-1, 8)):
        params = SamplingParams(max_tokens=1, truncate_prompt_tokens=length)
        (output,) = llm.generate([[5, 6, 7, 8, 9, 10, 11, 12]], params)
        assert output.prompt_token_ids == [5, 6, 7, 8, 9, 10, 11, 12][-left:]
    (output,) = llm.generate([[5] * 600], SamplingParams(max_tokens=12, truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == 500


def test_a_prompt_in_pieces_has_no_end_to_keep(scope: dict[str, Any]) -> None:
    """Fault: a parameter that is taken and does nothing."""
    for more in ({"truncate_prompt_tokens": 3}, {"n": 2}, {"prompt_logprobs": 1}):
        with pytest.raises(ValueError, match="leave them out, or give the prompt whole"):
            scope["llm"].open_prompt(SamplingParams(**more))


def test_prompts_of_different_salts_share_nothing(scope: dict[str, Any]) -> None:
    llm, params = scope["llm"], SamplingParams(max_tokens=1)
    prompt = {"prompt_token_ids": list(range(5, 105))}
    salted = [{**prompt, "cache_salt": salt} for salt in ("a", "b", "a")]
    found = [llm.generate(each, params)[0].num_cached_tokens for each in salted]
    assert found[0] == found[1] == 0 < found[2]


def test_metrics_count(scope: dict[str, Any]) -> None:
    llm = scope["llm"]
    before = {metric.name: metric.value for metric in llm.get_metrics()}
    (output,) = llm.generate("hello there", SamplingParams(max_tokens=3, ignore_eos=True))
    after = {metric.name: metric.value for metric in llm.get_metrics()}
    assert after["vllm:prefix_cache_queries"] - before["vllm:prefix_cache_queries"] == len(
        output.prompt_token_ids
    )
    assert after["quire:prefill_tokens_per_second"] > 0
    times = output.metrics
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert times.num_generation_tokens == 3


def test_an_async_engine() -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    async def read(llm: AsyncLLM, request_id: str, params: SamplingParams) -> list[Any]:
        return [output async for output in llm.generate("hello", params, request_id)]

    async def use(llm: AsyncLLM) -> None:
        many = await asyncio.gather(*(read(llm, str(number), params) for number in range(5)))
        finals = {tuple(outputs[-1].outputs[0].token_ids) for outputs in many}
        assert len(finals) == 1 and len(finals.pop()) == 8
        growing = [len(output.outputs[0].token_ids) for output in many[0]]
        assert growing == sorted(set(growing))
        delta = params.clone(output_kind=RequestOutputKind.DELTA, n=2, seed=1, temperature=1)
        tokens: dict[int, int] = {}
        for output in await read(llm, "d", delta):
            for sample in output.outputs:
                tokens[sample.index] = tokens.get(sample.index, 0) + len(sample.token_ids)
        assert tokens == {0: 8, 1: 8}
        assert not llm.engine.client.has_unfinished

        long = params.clone(max_tokens=400)
        stream = llm.generate("hello", long, "long")
        await anext(stream)
        with pytest.raises(ValueError, match="'long' is open already"):
            await anext(llm.generate("hello", params, "long"))
        await llm.abort(["long", "unknown"])
        last = [output async for output in stream][-1]
        text = many[0][-1].outputs[0].text
        assert last.finished and last.outputs[0].finish_reason == "abort"
        async for _ in llm.generate("hello", long, "left"):
            break
        with pytest.raises(ValueError, match="no tokens"):
            await anext(llm.generate([], params, "bad"))
        with pytest.raises(ValueError, match="600 tokens"):
            await anext(llm.generate([5] * 600, params, "bad"))
        stop = params.clone(stop=text[3:5], max_tokens=300)
        assert (await read(llm, "stop", stop))[-1].outputs[0].finish_reason == "stop"

        assert (await llm.get_tokenizer()).eos_token_id is not None
        stream = llm.generate("hello", long, "asleep")
        await anext(stream)
        await llm.sleep()
        ended = [output async for output in stream][-1]
        assert ended.outputs[0].finish_reason == "abort" and await llm.is_sleeping()
        await llm.wake_up()
        await llm.pause_generation(mode="keep")
        paused = asyncio.ensure_future(read(llm, "paused", params))
        await llm.reset_prefix_cache()
        assert await llm.is_paused() and not paused.done()
        await llm.resume_generation()
        assert len((await paused)[-1].outputs[0].token_ids) == 8
        assert (await llm.get_metrics())[0].name
        await llm.check_health()
        assert llm.is_running and not llm.errored and not llm.is_stopped
        with pytest.raises(AttributeError, match="loads adapters as they are named"):
            await llm.add_lora(1)

    with AsyncLLM.from_engine_args(quire.AsyncEngineArgs(**MODEL)) as llm:
        asyncio.run(use(llm))

        async def leave_open() -> None:
            await anext(llm.generate("hello", params.clone(max_tokens=400), "open"))

        asyncio.run(leave_open())  # the next loop finds the engine free
        outputs = asyncio.run(read(llm, "open", params))
        assert len(outputs[-1].outputs[0].token_ids) == 8
    llm.shutdown()

    async def after() -> None:
        with pytest.raises(quire.EngineError, match="was shut down"):
            await anext(llm.generate("hello"))

    asyncio.run(after())


@contextmanager
def unhurried(llm: AsyncLLM) -> Iterator[AsyncLLM]:
    """An engine with steps so long that an answer of hundreds of tokens is not over before a busy
    machine has read a few of them."""
    step = llm.engine.client.step

    def slow() -> Any:
        time.sleep(0.02)
        return step()

    with llm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.client, "step", slow)
        yield llm


def test_streams_go_on_while_an_async_engine_waits_to_pause() -> None:
    """Turns red when they stand still until all have ended, or an abort then does nothing. There
    are more tokens to come than the test has time for."""
    params = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)

    async def use(llm: AsyncLLM) -> None:
        for begin, resume in (
            (llm.pause_generation, llm.resume_generation),
            (llm.sleep, llm.wake_up),
        ):
            stream = llm.generate("hello", params, "long")
            await anext(stream)
            pause = asyncio.ensure_future(begin(mode="wait"))
            for _ in range(3):
                await anext(stream)
            late = asyncio.ensure_future(read(llm.generate("hello", params.clone(max_tokens=2))))
            await anext(stream)
            assert not pause.done() and not late.done()
            await llm.abort("long")
            assert (await read(stream))[-1].outputs[0].finish_reason == "abort"
            await pause
            assert await llm.is_paused()
            await resume()
            assert len((await late)[-1].outputs[0].token_ids) == 2
        assert llm.engine.client.stats().steps_total < 300

    async def read(stream: AsyncIterator[Any]) -> list[Any]:
        return [output async for output in stream]

    with unhurried(AsyncLLM(**MODEL)) as llm:
        asyncio.run(use(llm))


def test_who_stops_waiting_for_an_async_pause_goes_on() -> None:
    """Turns red when admission stays closed, or the pause comes after all."""
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)

    async def use(llm: AsyncLLM) -> None:
        stream = llm.generate("hello", params, "long")
        await anext(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.pause_generation(mode="wait"), 0.01)
        async for _ in llm.generate("hello", params.clone(max_tokens=2)):
            pass
        assert not await llm.is_paused()
        await llm.abort("long")

    with unhurried(AsyncLLM(**MODEL)) as llm:
        asyncio.run(use(llm))


def test_going_on_ends_an_async_pause_that_waits() -> None:
    """Fault: the call to go on is done first, and the engine stops for ever when requests end."""
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)

    async def use(llm: AsyncLLM) -> None:
        for go_on in (llm.resume_generation, llm.wake_up):
            stream = llm.generate("hello", params, "long")
            await anext(stream)
            pause = asyncio.ensure_future(llm.pause_generation(mode="wait"))
            await anext(stream)
            later = asyncio.ensure_future(llm.sleep(mode="keep"))
            await anext(stream)
            assert not later.done()  # it would stop what the pause waits for
            pauses = asyncio.gather(pause, later, return_exceptions=True)
            await llm.reset_prefix_cache()
            if go_on == llm.resume_generation:
                later.cancel()
            await go_on()
            refused, _ = await pauses
            assert "told to go on" in str(refused)
            assert not await llm.is_paused() and not await llm.is_sleeping()
            async for _ in llm.generate("hello", params.clone(max_tokens=2)):
                pass
            await stream.aclose()

    with unhurried(AsyncLLM(**MODEL)) as llm:
        asyncio.run(asyncio.wait_for(use(llm), 60))


def test_who_waits_for_a_pause_hears_of_the_end() -> None:
    async def use(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
        stream = llm.generate("hello", params, "long")
        await anext(stream)
        pause = asyncio.ensure_future(llm.pause_generation(mode="wait"))
        await anext(stream)
        llm.shutdown()
        with pytest.raises(quire.EngineError, match="was shut down"):
            await pause

    with unhurried(AsyncLLM(**MODEL)) as llm:
        asyncio.run(use(llm))


def test_an_async_engine_that_dies_tells_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(llm: AsyncLLM) -> None:
        stream = llm.generate("hello", SamplingParams(max_tokens=400, ignore_eos=True), "a")
        await anext(stream)

        def fail() -> None:
            raise MemoryError("no more")

        monkeypatch.setattr(llm.engine.client, "step", fail)
        with pytest.raises(quire.EngineError, match="has died: no more"):
            async for _ in stream:
                pass
        with pytest.raises(quire.EngineError, match="has died: no more"):
            await llm.check_health()
        assert llm.errored and isinstance(llm.dead_error, MemoryError)

    with AsyncLLM(**MODEL) as llm:
        asyncio.run(use(llm))

"""Arguments, methods and names of vLLM's Python API for which there is no counterpart, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.base.foreign import ForeignName, nearest

__all__ = ["CALL_ARGUMENTS", "MISSING_METHODS", "missing_name"]

_LORA = "generate(…, lora_request=LoRARequest(name, id, path)) loads adapters as they are named"
_EMBEDS = "LLM gives vectors, scores and classes: embed, score, classify and encode"
_STRUCTURE = "SamplingParams(structured_outputs=StructuredOutputsParams(…)) does it"
_KEPT = "encoded images are kept by their contents, within image_cache"
_PREPARED = "LLM(mm_processor_kwargs=…) says how images of all prompts are prepared"
_ONE_PROCESS = "it computes in this process; `engine` has what it is made of"

CALL_ARGUMENTS: Mapping[str, ForeignName] = {
    "use_tqdm": ForeignName("there is nothing to wait for here", None),
    "lora_request": ForeignName("generate, chat, encode and beam_search take adapters"),
    "prompt_adapter_request": ForeignName("there are no prompt adapters"),
    "guided_options_request": ForeignName(_STRUCTURE),
    "mm_processor_kwargs": ForeignName(_PREPARED),
    "multi_modal_data": ForeignName("it is a key of a prompt"),
    "chat_template_content_format": ForeignName("it is read from the chat template itself", None),
    "pooling_task": ForeignName("PoolingParams(pooling=…) says what is made", ("embed",)),
    "tokenization_kwargs": ForeignName("SamplingParams(truncate_prompt_tokens=…) cuts prompts"),
    "prompt_token_ids": ForeignName("give token ids in place of the prompts"),
    "prompt_text": ForeignName("the text of token ids is decoded where it is asked for", None),
    "arrival_time": ForeignName("it is taken when the request comes", None),
    "trace_headers": ForeignName("there are no traces yet", None),
    "data_parallel_rank": ForeignName("there is one engine", ("0",)),
    "concurrency_limit": ForeignName("max_num_seqs of the engine bounds what runs at once", None),
    "reasoning_ended": ForeignName("answers are not parsed for reasoning yet"),
    "usage_context": ForeignName("nothing is reported to anybody", None),
    "stat_loggers": ForeignName("get_metrics() has the statistics"),
    "start_engine_loop": ForeignName("it starts with the first request", None),
    "log_requests": ForeignName("requests are not logged", None),
    "log_stats": ForeignName("get_metrics() has the statistics", None),
    "tags": ForeignName("sleep and wake_up are of weights and KV cache together"),
    "reset_connector": ForeignName("KV blocks do not leave the engine yet"),
    "wait_for_inflight_requests": ForeignName('mode="wait" does it'),
    "clear_cache": ForeignName("reset_prefix_cache does it"),
}
"""Arguments of `generate`, `chat`, and what is beside them."""

MISSING_METHODS: Mapping[str, str] = {
    **dict.fromkeys(
        ("encode", "embed", "classify", "score", "reward", "get_supported_tasks"), _EMBEDS
    ),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), _LORA),
    **dict.fromkeys(
        ("collective_rpc", "apply_model", "model_executor", "init_weight_transfer_engine"),
        "the process that computes runs no code of a caller's; update_weights replaces weights",
    ),
    **dict.fromkeys(("preprocess_chat", "preprocess_cmpl"), "get_tokenizer() renders prompts"),
    **dict.fromkeys(
        ("vllm_config", "model_config", "scheduler_config", "cache_config", "parallel_config"),
        "engine.resolved.settings has all settings, and engine.spec the model",
    ),
    **dict.fromkeys(("reset_mm_cache", "reset_encoder_cache", "input_processor"), _KEPT),
    **dict.fromkeys(("do_log_stats", "get_vllm_config", "record_metrics"), "get_metrics() tells"),
    **dict.fromkeys(("llm_engine", "engine_core", "output_processor"), _ONE_PROCESS),
    **dict.fromkeys(("from_vllm_config", "create_engine_config"), "from_engine_args does it"),
    **dict.fromkeys(
        ("set_tokenizer", "get_tokenizer_group"),
        "the tokenizer is chosen at the start: LLM(tokenizer=…)",
    ),
    "update_weights_from_ipc": "update_weights takes tensors",
    "scale_elastic_ep": "there is one device",
    "is_tracing_enabled": "there are no traces yet",
    "get_model": "engine.spec describes the model",
}
"""Methods and attributes of engines."""

_MISSING_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("GuidedDecodingParams", "GuidedDecodingRequest"), _STRUCTURE),
    **dict.fromkeys(
        ("RewardRequestOutput", "PoolingType"), _EMBEDS
    ),
    **dict.fromkeys(
        ("MultiModalDataDict", "MultiModalDataBuiltins", "MultiModalPlaceholderDict"), _KEPT
    ),
    **dict.fromkeys(("EmbedsPrompt", "EmbedsInputs"), "prompts are texts or token ids so far"),
    **dict.fromkeys(
        ("ExplicitEncoderDecoderPrompt", "EncoderDecoderInputs", "build_explicit_enc_dec_prompt"),
        "no model has an encoder",
    ),
    "initialize_ray_cluster": "quire runs on one machine so far",
    "ModelRegistry": "a package adds models by the entry points quire.models and quire.model_specs",
    "ForwardContext": "steps are no context: models get all that they read as arguments",
    "SamplingType": "SamplingParams.is_greedy tells it",
    "DataPrompt": _KEPT,
}  # fmt: skip
"""Names that `from quire import …` has none of."""


def missing_name(module: str, name: str, known: Iterable[str]) -> Exception:
    """The error for a name that a module lacks: an ImportError with the reason for one of vLLM's,
    since an import drops what an AttributeError says."""
    if name in _MISSING_NAMES:
        return ImportError(f"{module} has no {name}: {_MISSING_NAMES[name]}")
    near = nearest(name, known)
    advice = f"; did you mean {near}?" if near else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{advice}")

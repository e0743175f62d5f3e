"""Settings that vLLM's users give to `LLM`, `EngineArgs` and the command line."""

from __future__ import annotations

from collections.abc import Mapping

from quire.base.foreign import ForeignName

__all__ = ["ALIASES", "FOREIGN_SETTINGS", "SPELLINGS"]

ALIASES: Mapping[str, str] = {
    "gpu_memory_utilization": "memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
    "kv_offloading_size": "swap_space",
}
"""Names that vLLM users know, and what they are called here."""

SPELLINGS: Mapping[tuple[str, str], str] = {
    ("dtype", "half"): "float16",
    ("dtype", "float"): "float32",
    ("generation_config", "vllm"): "none",
    ("device", "gpu"): "cuda",
    ("distributed_executor_backend", "uni"): "mp",
    ("device", "rocm"): "cuda",
}
"""Values that vLLM users know, by setting, and what they are called here."""


def _names(
    words: str,
    reason: str,
    neutral: tuple[str, ...] | None = (),
    always: str | None = None,
    *,
    is_told: bool = False,
) -> dict[str, ForeignName]:
    return dict.fromkeys(words.split(), ForeignName(reason, neutral, always, is_told))


_ANY_TASK = "a model generates text, and gives vectors, scores and classes, as far as it can"
_TASKS = (
    "auto", "none", "generate", "pooling", "embed", "embedding", "encode", "score", "classify"
)  # fmt: skip
_ONE, _NONE_LEFT = ("1",), ("0", "0.0")

_NOT_NEEDED: Mapping[str, ForeignName] = {
    **_names("trust_remote_code code_revision", "code from a checkpoint is never run", None),
    **_names(
        "enable_chunked_prefill",
        "long prompts are always computed in chunks",
        ("true",),
        always="",
    ),
    **_names(
        "async_scheduling",
        "depth=2 steps are in flight unless you set another depth",
        ("true",),
        always="set depth to 1 to turn it off",
    ),
    **_names("tokenizer_mode", "there is one kind of tokenizer", ("auto", "hf", "fast", "slow")),
    **_names("config_format", "config.json is read as Hugging Face writes it", ("auto", "hf")),
    **_names(
        "compilation_config optimization_level cudagraph_capture_sizes max_cudagraph_capture_size "
        "cudagraph_metrics",
        "nothing is compiled at start-up",
        None,
    ),
    **_names(
        "max_seq_len_to_capture max_context_len_to_capture",
        "a captured step serves every length",
        None,
    ),
    **_names("model_impl", "a model has one implementation", None),
    **_names(
        "ray_workers_use_nsight disable_custom_all_reduce all2all_backend "
        "max_parallel_loading_workers data_parallel_backend data_parallel_address "
        "data_parallel_rpc_port data_parallel_rank data_parallel_start_rank master_addr "
        "master_port disable_nccl_for_dp_synchronization expert_placement_strategy eplb_config "
        "dcp_kv_cache_interleave_size",
        "there is one device",
        None,
    ),
    **_names(
        "enable_expert_parallel",
        "each rank of tensor_parallel_size has whole experts anyway",
        None,
        is_told=True,
    ),
    **_names(
        "media_io_kwargs disable_mm_preprocessor_cache mm_processor_cache_gb "
        "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only "
        "mm_encoder_tp_mode mm_encoder_attn_backend skip_mm_profiling interleave_mm_strings "
        "disable_chunked_mm_input video_pruning_rate",
        "images are prepared as the checkpoint says, and image_cache keeps them",
        None,
    ),
    **_names(
        "disable_log_stats aggregate_engine_logging show_hidden_metrics_for_version "
        "kv_cache_metrics kv_cache_metrics_sample enable_mfu_metrics enable_layerwise_nvtx_tracing",
        "statistics are always kept and never printed by an LLM",
        None,
    ),
    **_names(
        "enable_log_requests disable_log_requests max_log_len",
        "requests are logged by a server alone, and only when asked",
        None,
    ),
    **_names("use_tqdm_on_load", "quiet=True turns progress off", None),
    **_names("served_model_name", "outputs do not name the model", None),
    **_names("max_logprobs", "a request may ask for up to 1024 log-probabilities", None),
    **_names("enable_sleep_mode", "every engine can sleep", None),
    **_names(
        "safetensors_load_strategy pt_load_map_location model_loader_extra_config "
        "ignore_patterns use_v2_block_manager disable_async_output_proc disable_cascade_attn "
        "disable_hybrid_kv_cache_manager num_lookahead_slots tokenizer_pool_size stream_interval "
        "prefix_caching_hash_algo allow_deprecated_quantization additional_config "
        "profiler_config attention_config override_attention_dtype tokens_only",
        "it is about how another engine works inside",
        None,
    ),
    **_names(
        "lora_dtype fully_sharded_loras lora_extra_vocab_size long_lora_scaling_factors "
        "enable_tower_connector_lora",
        "adapters have the dtype of the model",
        ("auto",),
    ),
    **_names("runner task convert", f"{_ANY_TASK}, without being told which", _TASKS),
}
"""Settings that mostly ask for the default behaviour."""

_MISSING: Mapping[str, ForeignName] = {
    **_names("worker_use_ray", "distributed_executor_backend='ray' does it"),
    **_names(
        "pipeline_parallel_size nnodes "
        "prefill_context_parallel_size decode_context_parallel_size data_parallel_size_local "
        "num_scheduler_steps",
        "quire runs on one device so far",
        _ONE,
    ),
    **_names("node_rank", "quire runs on one machine so far", ("0",)),
    **_names(
        "data_parallel_hybrid_lb data_parallel_external_lb enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold enable_eplb",
        "quire runs on one device so far",
        ("0",),
    ),
    **_names(
        "cpu_offload_gb offload_backend cpu_offload_params offload_group_size offload_num_in_group "
        "offload_prefetch_step",
        "weights have one place so far",
        (*_NONE_LEFT, "auto"),
    ),
    **_names(
        "kv_offloading_backend",
        "evicted KV blocks stay in host memory (swap_space) or on a disk (kv_disk)",
        ("native",),
    ),
    **_names(
        "default_mm_loras qlora_adapter_name_or_path enable_prompt_adapter",
        "adapters are LoRA of language models",
    ),
    **_names(
        "guided_decoding_backend guided_decoding_disable_fallback structured_outputs_config "
        "logits_processor_pattern",
        "there is one library for structured output, which needs no setting",
        ("auto",),
    ),
    **_names(
        "reasoning_parser reasoning_parser_plugin",
        "answers are not parsed for reasoning yet",
    ),
    **_names(
        "speculative_model num_speculative_tokens",
        "give it in speculative_config",
    ),
    **_names(
        "kv_transfer_config ec_transfer_config",
        "KV blocks do not leave the engine yet",
    ),
    **_names(
        "otlp_traces_endpoint collect_detailed_traces",
        "traces of requests are the server's: `quire serve --otlp-traces-endpoint URL`",
        ("none",),
    ),
    **_names(
        "io_processor_plugin",
        "prompts are texts or token ids so far",
    ),
    **_names(
        "pooler_config override_pooler_config",
        "requests say it, in PoolingParams(pooling=…, normalize=…); else the model's files do",
    ),
    **_names(
        "override_generation_config",
        "give these values in SamplingParams, or generation_config='none' for neutral ones",
    ),
    **_names("rope_scaling rope_theta", "give it in hf_overrides"),
    **_names("hf_config_path", "config.json is read from the model's folder"),
    **_names(
        "hf_token",
        "set HF_TOKEN in the environment, since every user of a machine can read its command lines",
    ),
    **_names(
        "tokenizer_revision",
        "revision is of the model's repository; of others, give a local folder",
    ),
    **_names("scheduler_cls", "scheduling_policy takes a class, as package.module:Class"),
    **_names(
        "worker_cls worker_extension_cls", "the process that computes has no parts to replace"
    ),
    **_names(
        "weight_transfer_config",
        "weights come in requests or files (docs/weights.md), and not between GPUs; leave it out "
        "and give --enable-engine-control",
        ('{"backend": "file"}', '{"backend":"file"}'),
    ),
    **_names("logits_processors", "SamplingParams takes them, for one request"),
    **_names("disable_sliding_window", "models keep the attention that they were trained with"),
    **_names("calculate_kv_scales kv_sharing_fast_prefill", "KV caches have no such mode"),
    **_names(
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode",
        "states are kept as they run; num_state_checkpoints says how many are kept for prefixes",
        ("auto", "none"),
    ),
    **_names("override_neuron_config", "quire does not run on Neuron devices"),
}
"""Settings whose feature is missing."""

FOREIGN_SETTINGS: Mapping[str, ForeignName] = {**_NOT_NEEDED, **_MISSING}
"""All settings of other engines, by name."""

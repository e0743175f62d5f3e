"""Choice of the device, its dtype, and how much it computes at once."""

from __future__ import annotations

from quire.base.errors import ConfigError
from quire.base.platform import GpuFacts, Platform
from quire.config import env
from quire.config.model_spec import ModelSpec
from quire.config.settings import EngineSettings

__all__ = [
    "check_threads",
    "choose_device",
    "choose_dtype",
    "choose_seqs",
    "choose_step_tokens",
    "describe_gpu",
]

SEQS_PER_CORE = 32
"""Rows at which a CPU core's matrix kernels reach their peak; more rows only wait longer."""

MIN_SEQS, MAX_SEQS = 16, 256
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 256, 2048

STEP_SECONDS = 0.4
"""Longest step of prompts on a CPU, unless `MIN_STEP_TOKENS` take longer. Running sequences wait
for it, and longer steps hardly compute faster (benchmarks/results/step_tokens.json)."""

CORE_FLOPS = 80e9
"""Order of what one core reaches in a matrix product, multiplications and additions per second."""

TILE_FLOPS = 1e12
"""The same of a core with tile registers (AMX), for formats that they take."""

MOST_THREADS, MOST_THREADS_PER_CORE = 64, 16
"""num_threads is refused above the larger of the two. A few more threads than cores slow an engine
down; with hundreds it makes no token in seconds, and cannot even be interrupted."""

LARGE_GPU_BYTES = 70 * 2**30
"""Memory from which a GPU counts as one for servers, whose bandwidth and arithmetic ask for larger
batches."""

GPU_SEQS, LARGE_GPU_SEQS = 256, 1024
GPU_STEP_TOKENS, LARGE_GPU_STEP_TOKENS = 2048, 8192

_NATIVE_FLOAT16 = ("avx512_fp16", "amx_fp16", "asimdhp")


def choose_device(asked: str, platform: Platform) -> tuple[str, str]:
    """Return "cpu" or "cuda", and the reason. asked: one of these, or "auto". "cuda" is any GPU,
    AMD's as well.

    Raises ConfigError with what to do if a GPU is asked for and none can compute.
    """
    gpu, problem = platform.gpu, platform.gpu_problem
    if asked == "cpu":
        return "cpu", "as asked"
    if gpu is not None and problem is None:
        return "cuda", describe_gpu(gpu)
    problem = problem or "nobody looked for one"
    if asked == "cuda":
        raise ConfigError(f"device='cuda' cannot serve: {problem}. Or give device='cpu'.")
    if gpu is None:
        return "cpu", problem.partition(":")[0]  # whoever has none wants no advice on it
    return "cpu", f"the GPU cannot serve: {problem}"


def describe_gpu(gpu: GpuFacts) -> str:
    """ "NVIDIA H200, SM 90, driver 570.86 for CUDA 12.8; the first of 4"."""
    parts = [gpu.name, gpu.architecture]
    if gpu.driver:
        cuda = "" if gpu.driver_cuda is None else " for CUDA {}.{}".format(*gpu.driver_cuda)
        parts.append(f"driver {gpu.driver}{cuda}")
    text = ", ".join(parts)
    if gpu.num_visible == 1:
        return text
    variable = "CUDA_VISIBLE_DEVICES" if gpu.vendor == "nvidia" else "HIP_VISIBLE_DEVICES"
    return f"{text}; the first of {gpu.num_visible}, {variable} chooses"


def choose_dtype(settings: EngineSettings, spec: ModelSpec, platform: Platform) -> tuple[str, str]:
    """The dtype of the computation and why."""
    if settings.dtype != "auto":
        return settings.dtype, "as asked"
    if platform.device == "cuda" and spec.dtype == "float32":
        return "bfloat16", "the checkpoint's float32 is many times slower on a GPU"
    if (
        spec.dtype == "float16"
        and platform.device == "cpu"
        and not any(platform.cpu.has(feature) for feature in _NATIVE_FLOAT16)
    ):
        return "bfloat16", "the checkpoint's float16 has no instructions on this CPU; as small"
    return spec.dtype, "as in the checkpoint"


def choose_seqs(settings: EngineSettings, spec: ModelSpec, platform: Platform) -> tuple[int, str]:
    """max_num_seqs and why. Every running sequence must get a token in every step, so there are
    never more of them than tokens in a step; an image that is computed whole must fit in beside
    all other sequences."""
    seqs, tokens, chunk = settings.max_num_seqs, settings.max_num_batched_tokens, spec.least_chunk
    least = (seqs or 1) - 1 + chunk
    if chunk > 1 and tokens is not None and tokens < least:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is less than the {chunk} tokens of an image, which "
            f"this model computes in one step, and one for each other sequence of "
            f"max_num_seqs={seqs or 1}. Give at least {least}, or "
            "limit_mm_per_prompt={'image': 0}."
        )
    if seqs is not None and tokens is not None and tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}, so not every "
            "sequence could get a token in a step. Raise the first or lower the second."
        )
    if seqs is not None:
        return seqs, "as asked"
    if platform.device == "cuda":
        seqs = LARGE_GPU_SEQS if _is_large(platform.gpu) else GPU_SEQS
        reason = "more rows at once read the weights no less often"
    else:
        cores = platform.cpu.num_cores
        seqs = min(MAX_SEQS, max(MIN_SEQS, SEQS_PER_CORE * cores))
        reason = f"more rows at once would only slow each other on {cores} cores"
    if tokens is not None and tokens < seqs - 1 + chunk:
        kept = f", {chunk} of which an image takes" if chunk > 1 else ""
        return tokens + 1 - chunk, f"one for each of max_num_batched_tokens{kept}"
    return seqs, reason


def choose_step_tokens(
    settings: EngineSettings, spec: ModelSpec, platform: Platform, max_num_seqs: int
) -> tuple[int, str]:
    """max_num_batched_tokens and why: on a CPU the power of two that takes it about `STEP_SECONDS`,
    so that a long prompt does not keep the other requests waiting for long."""
    longest = spec.max_context if spec.whole_prompts else 1
    if settings.max_model_len is not None:
        longest = min(longest, settings.max_model_len)
    asked = settings.max_num_batched_tokens
    if asked is not None and asked < longest:
        raise ConfigError(
            f"max_num_batched_tokens={asked} is less than the {longest} tokens of the longest "
            "prompt, and this model computes a prompt in one step. Raise it, or give "
            f"max_model_len={asked}."
        )
    if asked is not None:
        return asked, "as asked"
    reason = "short steps, so that a long prompt holds nobody up"
    if platform.device == "cuda":
        tokens = LARGE_GPU_STEP_TOKENS if _is_large(platform.gpu) else GPU_STEP_TOKENS
    else:
        tiles = _computes_in_tiles(settings, spec, platform)
        flops = platform.cpu.num_cores * (TILE_FLOPS if tiles else CORE_FLOPS)
        most = STEP_SECONDS * flops / (2 * spec.num_active_parameters)
        tokens = MIN_STEP_TOKENS
        while tokens < MAX_STEP_TOKENS and tokens * 2 <= most:
            tokens *= 2
        if tiles:
            reason += "; AMX is fast"
    least = max_num_seqs - 1 + spec.least_chunk
    if tokens < max(least, longest):
        image = " and an image" if spec.least_chunk > 1 else ""
        return max(least, longest), (
            "a whole prompt" if longest > least else f"one for each of max_num_seqs{image}"
        )
    return tokens, reason


def check_threads(num_threads: int, cores: int) -> None:
    """Raise ConfigError for threads of a CPU that would hardly compute."""
    most = max(MOST_THREADS, MOST_THREADS_PER_CORE * cores)
    if num_threads > most:
        raise ConfigError(
            f"num_threads={num_threads} is far more than the usable cores, {cores}: the threads "
            f"would do little but wait for each other. Give {cores}, and {most} at most."
        )


def _computes_in_tiles(settings: EngineSettings, spec: ModelSpec, platform: Platform) -> bool:
    """Return whether the kernels of AMX take the model's matrices (`quire.ops`)."""
    of_floats = settings.quantization is None or settings.activation_bits == 16
    if of_floats and (spec.dtype != "bfloat16" or settings.linear_isa not in (None, "amx")):
        return False
    if env.cpu_isa() not in (None, "amx") or platform.cpu.tiles_refused:
        return False
    if platform.kernels is not None and "amx" not in platform.kernels:
        return False
    return platform.cpu.has("amx_tile", "amx_bf16", "amx_int8")


def _is_large(gpu: GpuFacts | None) -> bool:
    return gpu is not None and gpu.memory_bytes >= LARGE_GPU_BYTES

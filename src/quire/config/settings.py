"""Settings of an engine. Each has an effect; unset ones are chosen by `quire.config.resolve` from
the model and the machine, and the choice is printed with its reason.

A setting is declared once, in the section whose constructors take it. `LLM(**settings)`, the flags
and their help, variables of the environment, keys of files and `docs/settings.md` are made from
the declarations; `quire.config.resolved` narrows the types of those that may be left open.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, cast

from quire.base.errors import ConfigError, quoted
from quire.base.foreign import nearest, shown
from quire.base.telemetry.kv_events import parse_kv_events
from quire.config.env import KERNEL_ISAS
from quire.config.foreign import ALIASES, FOREIGN_SETTINGS, SPELLINGS
from quire.config.kv_layout import FP8_DTYPES
from quire.config.memory.amounts import parse_bytes, parse_count
from quire.config.model_spec import DTYPE_BYTES
from quire.config.quantization import QUANTIZATIONS
from quire.config.speculation import METHODS, parse_speculation

__all__ = [
    "COMPUTE_DTYPES",
    "SCHEDULING_POLICIES",
    "SECTIONS",
    "CacheSettings",
    "EngineSettings",
    "ModelSettings",
    "NumericsSettings",
    "RuntimeSettings",
    "SchedulerSettings",
    "setting_fields",
    "setting_values",
]

_log = logging.getLogger("quire")

COMPUTE_DTYPES = ("bfloat16", "float16", "float32")

SCHEDULING_POLICIES = ("fcfs", "priority", "srtf", "two_level", "fair")
"""Names of the policies in `quire.plan.scheduler.policies`."""

_POLICY_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""A class of the user's: package.module:Class."""

_HOOK = re.compile(r"([\w.-]+=)?[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

DEFAULT_MEDIA_LIMIT = 16
"""Most media of one kind in a prompt, if the settings say nothing."""

_INT64_MAX = 2**63 - 1

_BARE_NUMBER = re.compile(r"\s*\d+(\.\d+)?\s*")


def _setting(default: Any, text: str, **rules: Any) -> Any:
    """A field with its help and its rules: choices, low, high, advice, kind (bytes or count)."""
    return field(default=default, metadata={"help": text, **rules})


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model, its location, and the length of its sequences."""

    model: str | None = _setting(
        None, "folder of a checkpoint or Hugging Face id; the bundled demonstration model if unset"
    )
    tokenizer: str | None = _setting(None, "folder or id of the tokenizer, if not the model's")
    chat_template: str | None = _setting(
        None, "file of a chat template, or the template itself, in place of the model's own"
    )
    control_tokens_in_content: bool = _setting(
        False,
        "take control tokens that messages spell out for what they are, so that a user's text may "
        "end its turn; otherwise they are text",
    )
    revision: str | None = _setting(None, "branch, tag or commit of a Hugging Face id")
    download_dir: str | None = _setting(None, "where fetched checkpoints are kept")
    load_format: str = _setting(
        "auto",
        "where weights come from; dummy: random numbers, no file is read",
        choices=("auto", "safetensors", "dummy"),
    )
    model_impl: str = _setting(
        "auto",
        "who computes the model: quire, or transformers over quire's paged attention, which is "
        "slower; auto: quire where it knows the architecture",
        choices=("auto", "quire", "transformers"),
    )
    max_model_len: int | None = _setting(
        None,
        "longest sequence, prompt and output; auto: the model's longest that the memory holds",
        kind="count",
        low=2,
    )
    hf_overrides: str | None = _setting(
        None,
        "values that stand in place of those of config.json, as a JSON object",
        kind="object",
    )
    skip_tokenizer_init: bool = _setting(
        False, "load no tokenizer: prompts and outputs are token ids"
    )
    enable_prompt_embeds: bool = _setting(
        False,
        "take prompts as embeddings too (prompt_embeds); all who may send requests may then feed "
        "the model any numbers",
    )
    enable_mm_embeds: bool = _setting(
        False,
        "take images as rows of the encoder too (image_embeds); all who may send requests may then "
        "feed the model any numbers",
    )
    limit_mm_per_prompt: str | None = _setting(
        None,
        'most images of one prompt, as {"image": 4}; 0 loads no image encoder '
        f"({DEFAULT_MEDIA_LIMIT})",
        kind="object",
    )
    max_image_bytes: int = _setting(
        20 * 2**20, "bytes of one image as it is sent or stored", kind="bytes", low=1
    )
    max_image_pixels: int = _setting(
        2**25, "pixels of one image, which are counted before it is decoded", kind="count", low=1
    )
    mmproj: str | None = _setting(
        None,
        "GGUF file with the image encoder of a GGUF model; if unset, the one beside the model that "
        "has mmproj in its name",
    )
    mm_processor_kwargs: str | None = _setting(
        None,
        "values that stand in place of those of preprocessor_config.json, as a JSON object; images "
        "are prepared with them",
        kind="object",
    )
    image_cache: int = _setting(
        64 * 2**20, "memory for encoded images that no request needs now", kind="bytes", low=0
    )
    image_memory: int = _setting(
        2**29, "memory for images of open requests; requests beyond it wait", kind="bytes", low=1
    )
    allowed_local_media_path: str | None = _setting(
        None, "folder of images that requests may name by path or file: URL; none if unset"
    )
    allowed_media_domains: str | None = _setting(
        None,
        "hosts from which the server fetches images by http: and https: URLs, with commas between "
        "them; none if unset",
    )
    enable_lora: bool = _setting(False, "take LoRA adapters: requests name one beside the model")
    max_loras: int = _setting(
        1, "LoRA adapters that compute in one step; requests for others wait", low=1, high=512
    )
    max_lora_rank: int = _setting(
        16, "largest rank of a LoRA adapter; memory is taken for it", low=1, high=512
    )
    max_cpu_loras: int | None = _setting(
        None, "LoRA adapters that stay in host memory, those in use included (max_loras)", low=1
    )
    generation_config: str = _setting(
        "auto",
        "auto: sampling defaults of the checkpoint's generation_config.json; none: neutral ones",
        choices=("auto", "none"),
    )

    def media_limit(self, kind: str) -> int:
        """Return the most media of a kind, such as "image", in a prompt. ConfigError if invalid."""
        chosen: dict[str, object] = json.loads(self.limit_mm_per_prompt or "{}")
        limit = chosen.get(kind, DEFAULT_MEDIA_LIMIT)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            given = self.limit_mm_per_prompt
            raise _invalid("limit_mm_per_prompt", given, 'counts, such as {"image": 4}')
        return limit

    @property
    def adapters_in_host(self) -> int:
        """Adapters that stay in host memory, at least those in slots."""
        return max(self.max_cpu_loras or 0, self.max_loras)


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """The KV cache: its format, its size, and what stays in it."""

    kv_cache_dtype: str = _setting(
        "auto",
        "dtype of the KV cache; auto: the model's; int8: half of bfloat16's memory; fp8 "
        "(e4m3, or e5m2): the same, slow, for comparison with other engines",
        choices=("auto", *DTYPE_BYTES, "int8", *FP8_DTYPES),
    )
    block_size: int | None = _setting(None, "tokens per KV block (16)", low=1, high=4096)
    kv_cache_memory: int | None = _setting(
        None, "memory of the KV cache, such as 4GiB", kind="bytes", low=1
    )
    memory_utilization: float | None = _setting(
        None,
        "share of the memory that the engine may use in all, weights included: a share of the "
        "free memory of a CPU, of all memory of a GPU (0.9)",
    )
    num_kv_blocks: int | None = _setting(
        None, "number of KV blocks, in place of kv_cache_memory", kind="count", low=1
    )
    swap_space: int | None = _setting(
        None,
        "host memory for preempted requests and evicted prefixes, such as 4GiB; a bare number is "
        "GiB",
        kind="bytes",
        low=0,
        bare_unit=2**30,
    )
    enable_prefix_caching: bool = _setting(
        True, "keep the KV of finished prompts for later ones that start the same"
    )
    kv_disk: str | None = _setting(
        None,
        "folder that keeps the KV of prompts across restarts; its readers can recover prompts",
    )
    kv_disk_bytes: int = _setting(
        20 * 10**9, "size that the files in kv_disk never exceed", kind="bytes", low=2**20
    )
    kv_events_config: str | None = _setting(
        None,
        "who is told which prefixes are cached, as vLLM's JSON object: enable_kv_cache_events, "
        "endpoint, replay_endpoint, …; they are sent unencrypted, and tokens are part of them",
        kind="object",
    )
    num_state_checkpoints: int | None = _setting(
        None,
        "recurrent states kept where prefixes end (four for each of max_num_seqs, in at most an "
        "eighth of the memory beside weights)",
        kind="count",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Order of requests, and size of steps."""

    max_num_seqs: int | None = _setting(
        None, "sequences that compute in one step", kind="count", low=1
    )
    max_num_batched_tokens: int | None = _setting(
        None, "tokens that compute in one step; a longer prompt takes several", kind="count", low=1
    )
    scheduling_policy: str = _setting(
        "fcfs",
        f"who goes first: {', '.join(SCHEDULING_POLICIES)}, or a class of yours as "
        "package.module:Class",
    )
    staging_queue_size: int = _setting(
        8, "requests among which two_level takes the shortest first", low=1
    )
    priority_ageing_s: float = _setting(
        10.0, "seconds of waiting that make up for one level of priority (priority, two_level)"
    )
    long_prefill_token_threshold: int | None = _setting(
        None,
        "tokens that one prompt computes in a step at most; 0: all that the step has room for",
        kind="count",
        low=0,
    )
    max_num_partial_prefills: int | None = _setting(
        None, "prompts that are computed in part at once; above 1 they share steps", low=1
    )
    max_long_partial_prefills: int | None = _setting(
        None, "of these, prompts longer than long_prefill_token_threshold", low=1
    )
    preemption_mode: str = _setting(
        "auto",
        "how preempted requests come back; auto: the cheaper way by measurement, if swap_space",
        choices=("auto", "recompute", "swap"),
    )
    speculative_config: str | None = _setting(
        None,
        "guesses at tokens, several of which one step verifies, as a JSON object: method "
        f"({', '.join(METHODS[:-1])} or {METHODS[-1]}), model, num_speculative_tokens",
        kind="object",
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Device and kernels that compute steps."""

    device: str = _setting(
        "auto",
        "where the engine computes; auto: on the first GPU that it may see, else on the CPU",
        choices=("auto", "cpu", "cuda"),
        advice="CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES chooses among several GPUs",
    )
    depth: int = _setting(
        2, "steps in flight; 1 plans a step when the last is done", low=1, high=16
    )
    enforce_eager: bool = _setting(
        False, "capture no steps: each kernel is called from Python, as a debugger wants it"
    )
    torch_compile: bool = _setting(
        False,
        "norms, activations and sums by torch's compiler in place of our own kernels; what it "
        "compiles is kept for the next start",
    )
    tensor_parallel_size: int = _setting(
        1,
        "processes that hold the model together, each a part of every layer (CPUs alone so far)",
        low=1,
        high=64,
    )
    distributed_executor_backend: str = _setting(
        "mp",
        "where the ranks are; mp: processes of this machine; ray: on hosts of a Ray cluster "
        "(RAY_ADDRESS, else one that runs here), as Ray places them",
        choices=("mp", "ray"),
    )
    data_parallel_size: int = _setting(
        1,
        "engines behind one server, each with all of the model; requests go to the least busy one",
        low=1,
        high=64,
    )
    num_threads: int | None = _setting(
        None, "CPU threads that compute, of each process; one per core", low=1
    )
    attention_backend: str | None = _setting(None, "attention backend; the best that serves here")
    linear_isa: str | None = _setting(
        None,
        "on a CPU, instruction set of matrix products; if unset that of the processor, unless "
        "another one was measured to be much faster for 16 bits",
        choices=KERNEL_ISAS,
    )
    attention_isa: str | None = _setting(
        None, "the same of attention, if no attention_backend is given", choices=KERNEL_ISAS
    )
    output_hook: str | None = _setting(
        None,
        "hooks that see outputs before clients do, as package.module:object; name=package.module:"
        "object is for requests that name it; several with commas",
    )
    output_hook_timeout: float = _setting(
        2.0, "seconds that a hook may take for one token; then the request fails"
    )
    quiet: bool = _setting(False, "print no plan and no progress at start-up")


@dataclass(frozen=True, kw_only=True)
class NumericsSettings:
    """Settings that decide the bits of a result."""

    dtype: str = _setting(
        "auto",
        "dtype of weights and activations; auto: the checkpoint's, if the device computes in it",
        choices=("auto", *COMPUTE_DTYPES),
    )
    quantization: str | None = _setting(
        None,
        "bits of matrices, made from a checkpoint as it loads; as it is if unset. "
        "int4: in groups of 32 inputs, or of 64 or 128 (g64, g128); sym: without zero points",
        choices=QUANTIZATIONS,
        advice="a checkpoint that is quantized already says itself how; leave it out then",
    )
    activation_bits: int | None = _setting(
        None,
        "bits of activations in products with matrices that are integers in memory; 16: they stay "
        "as they are, which is slower and closer to the model (8)",
        choices=(8, 16),
    )
    seed: int = _setting(0, "of requests that name no seed, and of dummy weights", low=-(2**63))
    logprobs_mode: str = _setting(
        "raw_logprobs",
        "logprobs of outputs: the model's, or those after penalties, temperature and filters",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    batch_invariant: bool = _setting(
        False,
        "results of a request have the same bits whatever is computed beside it, at the price of "
        "slower prompts on a GPU; on CPUs compiled kernels see to it in any case",
    )
    rank_invariant: bool = _setting(
        False,
        "results have the same bits with 1, 2, 4 and 8 tensor-parallel processes: sums that these "
        "share are made in 8 pieces, which is slower; for models without quantization or experts",
    )


SECTIONS: Mapping[str, type[Any]] = {
    "model": ModelSettings,
    "cache": CacheSettings,
    "scheduler": SchedulerSettings,
    "runtime": RuntimeSettings,
    "numerics": NumericsSettings,
}
"""The sections by name, in the order in which settings are listed."""


# Fields of base classes come in reverse, so the sections are named from last to first.
@dataclass(frozen=True, kw_only=True)
class EngineSettings(
    NumericsSettings, RuntimeSettings, SchedulerSettings, CacheSettings, ModelSettings
):
    """Settings as the user gave them; None and "auto" leave the choice to `resolve`.

    Construction checks each value on its own and raises ConfigError naming the setting, the value
    and what it may be. Use `from_options` for values that may be unknown, aliased or written as
    text ("4GiB", "32k").
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item, getattr(self, item.name))
        share = self.memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise _invalid("memory_utilization", share, "a share above 0 and at most 1")
        if not self.priority_ageing_s > 0.0:
            raise _invalid("priority_ageing_s", self.priority_ageing_s, "seconds above 0")
        if not self.output_hook_timeout > 0.0:
            raise _invalid("output_hook_timeout", self.output_hook_timeout, "seconds above 0")
        for hook in self.output_hooks:
            if not _HOOK.fullmatch(hook):
                allowed = "package.module:object or name=package.module:object"
                raise _invalid("output_hook", hook, allowed)
        policy = self.scheduling_policy
        if policy not in SCHEDULING_POLICIES and not _POLICY_CLASS.fullmatch(policy):
            allowed = f"one of: {', '.join(SCHEDULING_POLICIES)}, or package.module:Class"
            raise _invalid("scheduling_policy", self.scheduling_policy, allowed)
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError(
                "preemption_mode='swap' has no memory to swap to. Give swap_space, such as 4GiB."
            )
        parse_speculation(self.speculative_config)
        if parse_kv_events(self.kv_events_config) and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config has nothing to tell, since enable_prefix_caching is off. Leave "
                "one of them out."
            )
        sized = [n for n in ("kv_cache_memory", "num_kv_blocks") if getattr(self, n) is not None]
        if len(sized) == 2:
            raise ConfigError(
                f"kv_cache_memory={self.kv_cache_memory} and num_kv_blocks={self.num_kv_blocks} "
                "both size the KV cache; give one of them"
            )

    @property
    def output_hooks(self) -> tuple[str, ...]:
        """The parts of `output_hook`."""
        parts = (self.output_hook or "").split(",")
        return tuple(part.strip() for part in parts if part.strip())

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> EngineSettings:
        """Settings by name, as `LLM` and the command line take them.

        vLLM's names in `ALIASES` are accepted, sizes may be text, and None means unset. Names in
        `FOREIGN_SETTINGS` are accepted where their value asks for what is so anyway. Raises
        ConfigError for another name that does not exist, with the nearest one that does.
        """
        known = {item.name: item for item in fields(cls)}
        chosen: dict[str, Any] = {}
        for given, value in options.items():
            name = ALIASES.get(given, given)
            if name not in known:
                _pass_over(given, value, known)
                continue
            if value is not None and name in chosen:
                raise ConfigError(
                    f"{given}={value!r} and {name}={chosen[name]!r} are one setting; give it once"
                )
            if value is not None:
                chosen[name] = _normalised(known[name], value)
        return cls(**chosen)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> EngineSettings:
        """Settings that another process took from its user, by name: nothing is read as text, and
        a number of bytes is one."""
        return cls(**values)


def setting_fields() -> tuple[Field[Any], ...]:
    """The settings in order. `metadata`: help, and where they apply choices, kind, low, high."""
    return fields(EngineSettings)


def setting_values(settings: EngineSettings) -> dict[str, str | int | float | bool | None]:
    """The settings by name, as `EngineSettings.from_values` takes them in another process."""
    return {item.name: getattr(settings, item.name) for item in fields(settings)}


def _normalised(item: Field[Any], value: object) -> object:
    """Text to numbers, and other spellings of one value to one."""
    kind = item.metadata.get("kind")
    if type(value).__module__ == "torch":  # torch.bfloat16, torch.device("cuda")
        value = str(value).removeprefix("torch.")
    if item.name == "max_model_len" and value in (-1, "-1", "auto"):
        return None
    if isinstance(value, str) and (item.name, value) in SPELLINGS:
        return SPELLINGS[item.name, value]
    if kind == "object":
        return _object_text(item.name, value)
    if item.name == "output_hook" and isinstance(value, list | tuple):
        return ",".join(map(str, cast("list[object]", value))) or None
    bare_unit = item.metadata.get("bare_unit")
    if bare_unit is not None and _BARE_NUMBER.fullmatch(str(value)):
        return int(float(str(value)) * bare_unit)
    if isinstance(value, str) and kind is not None:
        try:
            return parse_bytes(value) if kind == "bytes" else parse_count(value)
        except ValueError:
            example = "4GiB" if kind == "bytes" else "4096 or 32k"
            raise _invalid(item.name, value, f"a number such as {example}") from None
    if _type_name(item) == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if item.name in ("model", "tokenizer", "download_dir") and hasattr(value, "__fspath__"):
        return str(value)
    return value


def _object_text(name: str, value: object) -> str | None:
    """A mapping, or the JSON text of one, as text in one spelling; None if it is empty."""
    try:
        found: object = json.loads(value) if isinstance(value, str) else value
        if not isinstance(found, Mapping):
            raise TypeError
        text = json.dumps(dict(cast("Mapping[str, object]", found)), sort_keys=True)
    except (TypeError, ValueError):
        raise _invalid(name, value, 'an object such as {"key": 1}; functions can\'t be') from None
    return None if text == "{}" else text


def _type_name(item: Field[Any]) -> str:
    """Return the type of a field's values, None excepted."""
    return cast("str", item.type).split(" | ")[0]


def _check(item: Field[Any], value: object) -> None:
    """One value against its field: type, choices, bounds."""
    rules, name = item.metadata, item.name
    if value is None and item.default is None:
        return
    wanted = _type_name(item)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": number and isinstance(value, int),
        "float": number and math.isfinite(cast("float", value)),
    }[wanted]
    if not fits:
        kinds = {"str": "text", "bool": "True or False", "int": "an integer", "float": "a number"}
        if "choices" in rules:
            raise _invalid(name, value, _one_of(rules))
        raise _invalid(name, value, kinds[wanted])
    if "choices" in rules and value not in rules["choices"]:
        raise _invalid(name, value, _one_of(rules))
    low, high = rules.get("low", -math.inf), rules.get("high", _INT64_MAX)
    if wanted == "int" and not low <= cast("int", value) <= high:
        tops_out = "high" in rules or cast("int", value) > high
        bounds = f"from {low} to {high}" if tops_out else f"of at least {low}"
        raise _invalid(name, value, f"an integer {bounds}")


def _one_of(rules: Mapping[str, Any]) -> str:
    more = f"; {rules['advice']}" if "advice" in rules else ""
    return f"one of: {', '.join(map(str, rules['choices']))}{more}"


def _invalid(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"Setting {name} cannot be {quoted(value)}. Give {allowed}.")


def _pass_over(name: str, value: object, known: Mapping[str, object]) -> None:
    """A name that is no setting: ConfigError, unless it asks for what is so anyway."""
    foreign = FOREIGN_SETTINGS.get(name)
    if foreign is None:
        near = nearest(name, [*known, *ALIASES])
        advice = f"Did you mean {near}?" if near else f"Use one of: {', '.join(sorted(known))}."
        raise ConfigError(f"There is no setting {name} (given as {value!r}). {advice}")
    if not foreign.asks_for_nothing(value):
        raise ConfigError(foreign.refusal(f"Setting {shown(name, value)}"))
    level = logging.WARNING if foreign.is_told_of(value) else logging.INFO
    _log.log(level, "%s is not needed: %s", shown(name, value), foreign.reason)

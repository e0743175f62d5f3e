"""Memory that an engine needs, from sizes alone: nothing is loaded and nothing is allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.config.checkpoint import Checkpoint
from quire.config.kv_layout import KVLayout
from quire.config.model_spec import GenericTraits, ModelSpec
from quire.config.quantization import quantized_bytes
from quire.config.settings import EngineSettings

__all__ = [
    "EXPERT_ROWS",
    "FEWEST_DRAFTS",
    "MAX_CAPTURED_ROWS",
    "PROMPT_LOGPROB_ROWS",
    "RUNTIME_BYTES",
    "FixedBytes",
    "MemoryPlan",
    "activation_bytes",
    "adapter_bytes",
    "capture_bytes",
    "capture_table_bytes",
    "expert_bytes",
    "image_bytes",
    "is_loaded",
    "largest_context",
    "logits_bytes",
    "states_bytes",
    "table_bytes",
    "weight_bytes",
]

RUNTIME_BYTES = 512 * 2**20
"""The process beside what is counted here: interpreter, torch and its libraries, thread stacks,
tokenizer (300 to 400 MiB measured with torch 2.13 for CPUs)."""

PROMPT_LOGPROB_ROWS = 64
"""Positions whose prompt logprobs are computed at once, which keeps [rows, V] small."""

MAX_CAPTURED_ROWS = 256
"""Rows of the largest decode step that is captured. The work in Python does not grow with the rows,
so that it is a smaller part of larger steps, but at 256 it is a tenth yet
(benchmarks/results/captured_rows_qwen3.json, _llama.json); larger steps were not measured."""

EXPERT_ROWS = 256
"""Rows of one expert that a thread computes at a time: kRowsPerTask of csrc/moe/tasks.h."""

FEWEST_DRAFTS = 16
"""Drafts that a step may have whatever `max_num_seqs` is; more of them only instead of sequences,
since memory is planned for the logits of so many, and for the tokens that a recurrent state may
have to see again."""

_BUFFER_ROUNDING = 16 * 64
"""Each of a captured step's buffers begins at a cache line."""

_FLOAT32_BYTES = 4
_INT32_BYTES = 4
_INT64_BYTES = 8
_BUFFERS = re.compile(r"rotary_emb\.|\.attn\.(masked_)?bias$|\.self_attn\.indexer\.")
"""Tensors that some checkpoints carry although they are no weights, or are not loaded."""

_TOKENS = re.compile(r"(^|\.)(embed_tokens|wte)\.weight$")
"""Tables of tokens, with which a tied head multiplies."""

_LOOKED_UP = re.compile(r"(^|\.)(embed_tokens_per_layer|embed_positions|wpe)\.weight$")
"""Tables with which nothing multiplies."""


@dataclass(frozen=True, slots=True)
class FixedBytes:
    """Bytes needed before the first KV block. activations: memory of the largest step, which on a
    CPU may be a captured one, and buffers of threads for experts. tables: token ids, block tables
    and rope tables, which grow with the context. swap: blocks in host memory, 0 if the device has
    memory of its own. graphs: memory held back on a GPU for steps that are captured later. states:
    recurrent states and their checkpoints. images: work of the image encoder, its cache, and
    images of open requests."""

    weights: int
    runtime: int
    activations: int
    logits: int
    tables: int
    swap: int = 0
    graphs: int = 0
    states: int = 0
    images: int = 0

    @property
    def total(self) -> int:
        parts = (self.weights, self.runtime, self.activations, self.logits, self.tables)
        return sum(parts) + self.swap + self.graphs + self.states + self.images


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Distribution of the memory. All sizes in bytes.

    free: free memory of the machine before start, 0 if it does not say. budget: most that the
    engine may take; None if `free` is unknown. kv_per_token: K and V of a token over all layers.
    capacity_tokens: tokens that the pool holds at once, counting a sliding layer like a full one.
    longest_context: longest context of a sequence that runs alone. max_concurrency: sequences of
    max_model_len that fit together.
    """

    free: int
    budget: int | None
    fixed: FixedBytes
    page: int
    num_kv_blocks: int
    kv_per_token: int
    capacity_tokens: int
    longest_context: int
    max_concurrency: float

    @property
    def kv_cache(self) -> int:
        return self.num_kv_blocks * self.page

    @property
    def total(self) -> int:
        return self.fixed.total + self.kv_cache


def weight_bytes(
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    quantization: str | None = None,
    device: str = "cpu",
) -> int:
    """Weights in the memory of a device, in `spec.dtype` but for matrices that are quantized.

    Packed weights replace the plain ones. In `spec.dtype` they take as much, but for less than 32
    rows of padding in a matrix whose rows are no multiple of 32, or in each half of a gated one;
    `RUNTIME_BYTES` has room for those. The one layer that exists twice while it is packed does so
    before the KV pool takes its memory.
    """
    widened = quantization is not None
    plain = _weight_bytes(spec, checkpoint, device, widened=widened)
    return quantized_bytes(spec, quantization, plain) if widened else plain


def adapter_bytes(spec: ModelSpec, settings: EngineSettings) -> int:
    """Places for LoRA adapters, which are taken whatever is loaded, and adapters in host memory of
    the largest rank: B, and A for up to three parts of each matrix (q, k and v). Parts that few
    adapters have, as of embeddings and experts, are not counted."""
    if not settings.enable_lora:
        return 0
    per_rank = sum(
        shape.count * (3 * shape.inputs + shape.outputs)
        for shape in spec.matrices
        if not shape.is_head
    )
    if (experts := spec.experts) is not None:  # they have no places: gate and up, and down
        sizes = 4 * spec.hidden_size + 5 * experts.inner_size
        per_rank -= experts.num_layers * experts.routing.num_experts * sizes
    num_adapters = settings.max_loras + settings.adapters_in_host
    return num_adapters * settings.max_lora_rank * per_rank * spec.dtype_bytes


def is_loaded(name: str) -> bool:
    """Return whether a tensor, by its name on disk, is a weight that layers read."""
    return _BUFFERS.search(name) is None


def _weight_bytes(
    spec: ModelSpec, checkpoint: Checkpoint | None, device: str, *, widened: bool
) -> int:
    """Return the bytes of the weights by the files' headers, or without files by the number of
    parameters. widened: matrices that come quantized count as plain.

    A tied LM head that is stored a second time counts once, but in a model that `transformers`
    computes, where the table stays beside the packed head.
    """
    tower = 0 if spec.images is None else spec.images.num_parameters * spec.dtype_bytes
    if checkpoint is None:
        return spec.num_parameters * spec.dtype_bytes + tower
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if is_loaded(name) and not name.startswith(spec.mtp_layers)
    }
    head = tensors.get("lm_head.weight")
    if spec.tie_word_embeddings and head is not None and head.packed is None:
        del tensors["lm_head.weight"]
    size = spec.dtype_bytes
    own_head = isinstance(spec.traits, GenericTraits) and spec.tie_word_embeddings
    return (
        tower
        + own_head * spec.vocab_size * spec.hidden_size * size
        + sum(
            math.prod(tensor.shape) * size
            if widened or tensor.packed is None or _is_table(name, spec)
            else tensor.packed.bytes_on(device)
            for name, tensor in tensors.items()
        )
    )


def _is_table(name: str, spec: ModelSpec) -> bool:
    """Return whether the matrix is only looked up, so that it is kept in `spec.dtype`."""
    is_head = spec.tie_word_embeddings
    return bool(_LOOKED_UP.search(name) or (_TOKENS.search(name) and not is_head))


def activation_bytes(spec: ModelSpec, num_tokens: int) -> int:
    """The most that a forward of `num_tokens` holds at once, logits excepted.

    Per token: the residual stream and its norm, before a block and in it, then either the next of
    both, or q, k, v with copies and the attention's output, or what another mixer holds, or the
    MLP's merged input and its product, of which a gate in the same kernel leaves the second alone.
    An embedding wider than the residual stream counts as its width. Experts hold the output of each
    that a token chose, and two outputs more where all tokens share a network. What a token has
    besides is made of two parts. Counted at 4 bytes per element whatever the dtype, because the
    references in plain torch compute in float32.
    """
    heads = (matrix.inputs for matrix in spec.matrices if matrix.is_head)
    width = max((spec.hidden_size, *heads))
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    attention = 2 * qkv + spec.num_heads * spec.head_dim
    inner = max(2 * width, attention, spec.mixer_size, 3 * spec.intermediate_size)
    if spec.experts is not None:
        shared = 3 * (spec.experts.shared_size or 0)
        inner = max(inner, (spec.experts.routing.top_k + 2) * width + shared)
    return num_tokens * (4 * width + inner + 3 * spec.side_size) * _FLOAT32_BYTES


def expert_bytes(spec: ModelSpec, num_tokens: int, num_threads: int) -> int:
    """Return what threads keep from step to step where experts compute (csrc/moe): each the rows of
    a task, gathered and between the two layers; one the picks of `num_tokens`, sorted."""
    if spec.experts is None:
        return 0
    routing = spec.experts.routing
    rows = min(num_tokens, EXPERT_ROWS)
    of_thread = rows * (spec.hidden_size + spec.experts.inner_size) * spec.dtype_bytes
    picks = _INT64_BYTES * (routing.num_experts + 2 + 2 * num_tokens * routing.top_k)
    return num_threads * of_thread + picks


def capture_bytes(spec: ModelSpec, num_rows: int, num_tokens: int = 0) -> int:
    """Arena of captured decode steps of up to `num_rows` rows, logits included, and of captured
    forwards of up to `num_tokens` tokens, one at a time. More than the activations: buffers of many
    sizes leave gaps. Those of forwards are counted in the model's dtype, since only kernels are
    captured."""
    logits = num_rows * spec.vocab_size * _FLOAT32_BYTES
    decoding = 2 * activation_bytes(spec, num_rows) + logits
    elements = activation_bytes(spec, num_tokens) // _FLOAT32_BYTES
    return max(decoding, elements * spec.dtype_bytes * 3 // 2) + _BUFFER_ROUNDING


def capture_table_bytes(layout: KVLayout, num_rows: int, max_model_len: int) -> int:
    """Block tables that a captured step of `num_rows` rows reads."""
    return num_rows * layout.blocks_for(max_model_len) * _INT32_BYTES


def logits_bytes(spec: ModelSpec, max_num_seqs: int) -> int:
    """Logits of every row and of one slice of prompt logprobs: the projection's result, its copy in
    float32, and one working copy in float32."""
    per_row = spec.vocab_size * (spec.dtype_bytes + 2 * _FLOAT32_BYTES)
    return (max_num_seqs + PROMPT_LOGPROB_ROWS) * per_row


def table_bytes(
    spec: ModelSpec, layout: KVLayout, max_num_seqs: int, max_model_len: int, copies: int
) -> int:
    """Return the bytes of token ids and block tables of all rows, and of cos and sin by position
    for each kind of rope.

    copies: number of copies of the rows in this memory: 2 if both the plan side's and the data
    side's are in it, else 1."""
    row = _INT32_BYTES * (max_model_len + 1 + layout.blocks_for(max_model_len))
    ropes = {rope for rope in spec.ropes if rope is not None}
    rope_tables = sum(rope.rotary_dim for rope in ropes) * max_model_len * _FLOAT32_BYTES
    return copies * max_num_seqs * row + rope_tables


def states_bytes(layout: KVLayout, max_num_seqs: int, num_checkpoints: int) -> int:
    """Recurrent states: two for each row, as a step reads one and writes the other, and one for
    each checkpoint; and inputs of the tokens that rows with drafts may have to see again."""
    states = (2 * max_num_seqs + num_checkpoints) * layout.state_bytes
    return states + (max_num_seqs + FEWEST_DRAFTS) * layout.state_input_bytes


def image_bytes(spec: ModelSpec, max_model_len: int, kept_bytes: int) -> int:
    """Memory for encoding one image that fits into a prompt, and for images that are kept; 0 for a
    model of text."""
    if spec.images is None:
        return 0
    return spec.images.work_elements(max_model_len) * _FLOAT32_BYTES + kept_bytes


def largest_context(fits: Callable[[int], bool], limit: int) -> int:
    """The largest length up to `limit` for which `fits`, 0 if none; `fits` is monotonic."""
    if fits(limit):
        return limit
    low, high = 0, limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

"""Memory of an engine beside its KV cache, as predicted before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable

from quire.config.kv_layout import KVLayout
from quire.config.memory.plan import (
    MAX_CAPTURED_ROWS,
    RUNTIME_BYTES,
    FixedBytes,
    activation_bytes,
    capture_bytes,
    capture_table_bytes,
    expert_bytes,
    image_bytes,
    logits_bytes,
    states_bytes,
    table_bytes,
)
from quire.config.model_spec import ModelSpec

__all__ = ["GPU_RUNTIME_BYTES", "MAX_GRAPH_ROWS", "FixedOf", "device_fixed", "host_fixed"]

FixedOf = Callable[[int], FixedBytes]
"""Fixed bytes as a function of the longest sequence, in tokens."""

GPU_RUNTIME_BYTES = 768 * 2**20
"""Device memory beside tensors: the driver's context, code of kernels, workspaces of libraries. An
estimate; the real value is measured before the KV cache takes its memory."""

MAX_GRAPH_ROWS = 512
"""Rows of the largest decode step that is captured on a GPU. Beyond it the GPU computes longer than
the host takes to launch."""

GRAPH_TOKENS = 512
"""Tokens of the largest mixed step that is captured in pieces."""

GRAPH_RUNTIME_BYTES = 256 * 2**20
"""Driver memory for the captured steps themselves, all sizes together. An estimate."""


def host_fixed(
    spec: ModelSpec,
    layout: KVLayout,
    *,
    weights: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_host_blocks: int,
    num_checkpoints: int,
    num_threads: int,
    image_memory: int,
    captures: bool,
) -> FixedOf:
    """Return the bytes of an engine on a CPU, where all is in one memory. num_checkpoints: number
    of checkpoints of recurrent states. image_memory: bytes of images of open requests and in the
    cache, if the model takes images. captures: whether steps are captured."""
    captured = min(max_num_seqs, MAX_CAPTURED_ROWS) if captures else 0
    tokens, rows = (max_num_batched_tokens, captured + max_num_seqs) if captures else (0, 0)
    # If steps are captured, one that is computed call by call first gives back their memory.
    activations = max(
        activation_bytes(spec, max_num_batched_tokens), capture_bytes(spec, captured, tokens)
    )
    activations += expert_bytes(spec, max_num_batched_tokens, num_threads)
    logits = logits_bytes(spec, max_num_seqs)

    def fixed(context: int) -> FixedBytes:
        tables = table_bytes(spec, layout, max_num_seqs, context, copies=2)
        return FixedBytes(
            weights=weights,
            runtime=RUNTIME_BYTES,
            activations=activations,
            logits=logits,
            tables=tables + capture_table_bytes(layout, rows, context),
            swap=num_host_blocks * layout.page_bytes,
            states=states_bytes(layout, max_num_seqs, num_checkpoints),
            images=image_bytes(spec, context, image_memory),
        )

    return fixed


def device_fixed(
    spec: ModelSpec,
    layout: KVLayout,
    *,
    weights: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    captures: bool,
) -> FixedOf:
    """Return the bytes of an engine in a GPU's memory. The swap space is not included."""
    captured = min(max_num_seqs, MAX_GRAPH_ROWS) if captures else 0
    activations = activation_bytes(spec, max_num_batched_tokens)
    logits = logits_bytes(spec, max_num_seqs)
    graphs = 0
    if captures:
        mixed = activation_bytes(spec, min(max_num_batched_tokens, GRAPH_TOKENS))
        graphs = GRAPH_RUNTIME_BYTES + capture_bytes(spec, captured) + mixed

    def fixed(context: int) -> FixedBytes:
        return FixedBytes(
            weights=weights,
            runtime=GPU_RUNTIME_BYTES,
            activations=activations,
            logits=logits,
            tables=table_bytes(spec, layout, max_num_seqs, context, copies=1)
            + capture_table_bytes(layout, captured, context),
            graphs=graphs,
            images=image_bytes(spec, context, 0),
        )

    return fixed

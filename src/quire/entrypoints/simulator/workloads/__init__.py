"""Traces: when requests come and how long they are, drawn from a seed or read from files."""

from quire.entrypoints.simulator.workloads.chat import draw_chat, draw_chat_prompts
from quire.entrypoints.simulator.workloads.datasets import TRACE_NAMES, draw_trace
from quire.entrypoints.simulator.workloads.read import read_trace
from quire.entrypoints.simulator.workloads.trace import (
    Piece,
    TraceRequest,
    engine_requests,
    longest,
)
from quire.entrypoints.simulator.workloads.translation import PREFIX_TOKENS, draw_translation

__all__ = [
    "PREFIX_TOKENS",
    "Piece",
    "TRACE_NAMES",
    "TraceRequest",
    "draw_chat",
    "draw_chat_prompts",
    "draw_trace",
    "draw_translation",
    "engine_requests",
    "longest",
    "read_trace",
]

"""The process of a toy (tests/how_to_toys.py). Its imports are those of a toy beside `quire`, so
that a template has them (tests/forked.py)."""

from __future__ import annotations

import sys

import fastapi
import httpx
import llguidance
import msgspec
import safetensors
import tokenizers
import torch
import uvicorn
import zmq

__all__ = ["main"]

USED = (fastapi, httpx, llguidance, msgspec, safetensors, tokenizers, torch, uvicorn, zmq)


def main() -> int:
    """Run a script over the `quire` of a folder."""
    _, folder, script = sys.argv
    assert "quire" not in sys.modules
    sys.path.insert(0, folder)
    exec(compile(script, "<check>", "exec"), {"__name__": "__main__"})
    return 0

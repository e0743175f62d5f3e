"""The memory explorer as one page of HTML that loads nothing from outside."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from importlib.resources import files
from string import Template

from quire.config.model_spec import ModelSpec
from quire.entrypoints.simulator.devices import device_named, device_names
from quire.entrypoints.simulator.explorer.memory import (
    KV_BITS,
    WEIGHT_BITS,
    MemoryQuestion,
    explore,
    render_memory,
)
from quire.entrypoints.simulator.memory import UTILIZATION
from quire.entrypoints.simulator.models import MODEL_NAMES, model_spec

__all__ = ["render_page"]


def render_page(name: str, spec: ModelSpec, question: MemoryQuestion) -> str:
    """Return the page, which begins with this model and question; its numbers are there without a
    script too. Raises ConfigError as `explore`."""
    table = explore(spec, question)
    others = {other: model_spec(other) for other in MODEL_NAMES if other != name}
    data = {
        "models": [
            _sizes(name, spec, question.weights),
            *(_sizes(each, found) for each, found in others.items()),
        ],
        "devices": [
            {"name": device.title, "bytes": device.memory_bytes}
            for device in map(device_named, device_names())
        ],
        "weight_bits": WEIGHT_BITS,
        "kv_bits": KV_BITS,
        "utilization": UTILIZATION,
        "question": asdict(question),
        "table": table.as_json(),
    }
    template = (files("quire.entrypoints.simulator.explorer") / "page.html").read_text(
        encoding="utf-8"
    )
    return Template(template).substitute(
        title=escape(f"Memory of {name}"),
        table=escape(render_memory(question, table)),
        data=json.dumps(data).replace("<", "\\u003c"),
    )


def _sizes(name: str, spec: ModelSpec, weights: int | None = None) -> dict[str, object]:
    """weights: bytes that are known, None if none are."""
    embedding = spec.parameters.embedding
    return {
        "name": name,
        "weights": weights,
        "matrices": spec.num_parameters - embedding,
        "embedding": embedding,
        "embedding_bytes": max(spec.dtype_bytes, 2),
        "kv_elements": spec.kv_elements,
        "context": spec.max_context,
    }

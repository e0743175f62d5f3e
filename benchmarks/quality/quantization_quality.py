"""Loss of quality by 8 and 4 bits: the bundled model over text that it was not trained on.

    python -m benchmarks.quality.quantization_quality [--max-bytes N] [--threads N] [--output FILE]

Every variant runs through the engine's own layers, so 8-bit activations count too, over the same
windows; each is compared with the model in the dtype of its checkpoint. KL is that of the next
token's distribution from the unquantized one, in nats per token; agreement is the share of places
where both hold the same token for the most probable. Nothing is drawn and nothing is timed, so one
pass is exact; standard errors, over windows, say how far other text might differ.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.arguments import command_line

from quire.base.platform import detect_platform
from quire.bundled import bundled_model_path
from quire.compute.attention import (
    AttentionBackend,
    AttentionNeeds,
    GroupInputs,
    KVPool,
    StepInputs,
    select_backend,
)
from quire.compute.layers import LayerFactory
from quire.compute.models import CausalLM, load_model
from quire.compute.quantization import (
    CuttableFormat,
    Int4Format,
    Int8Format,
    PlainFormat,
    quantize_int4,
)
from quire.compute.quantization.weight_format import WidensStored
from quire.config import MatrixShape, ModelSpec
from quire.config.kv_layout import KVLayout
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.ops import OpSet, PackedMatrix, Team, build_op_set
from quire.text.rendering import Tokenizer

TOOLS = Path(__file__).parents[2] / "tools" / "bundled_model"
WINDOW, CONTEXT = 2048, 1024
"""A window starts with CONTEXT tokens that were counted in the one before."""

BLOCK_SIZE = 16
BOS = 1


@dataclass(frozen=True)
class Window:
    """ids: tokens that the model reads, and last the token to predict there. new: number of
    predictions, from the end, that count here."""

    ids: list[int]
    new: int


@dataclass(frozen=True)
class Scores:
    """Scores of one window's new predictions: bits of the true tokens, KL in nats and agreement,
    summed; and their number."""

    bits: float
    divergence: float
    agreed: float
    count: int


@dataclass(frozen=True)
class Variant:
    """body: formats of all matrices but the head, the first that can hold a matrix wins."""

    name: str
    body: Sequence[tuple[int, CuttableFormat]]
    head: CuttableFormat

    def choose(self, shape: MatrixShape) -> CuttableFormat:
        """Choose like `MatrixFormats`."""
        if shape.is_head:
            return self.head
        return next(chosen for multiple, chosen in self.body if shape.inputs % multiple == 0)


class RoundToNearest(WidensStored):
    """4 bits in groups of 32 on the grid max|w| / 7, or (max - min) / 15 with a zero point. They
    show the gain of the search for better grids."""

    def __init__(self, ops: OpSet, *, zero_points: bool) -> None:
        self._ops = ops
        self._zero_points = zero_points

    def cut(self, inputs: range) -> None:
        """No rank has a part."""

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        groups = weight.float().unflatten(1, (-1, 32))
        if self._zero_points:
            low = groups.amin(2, keepdim=True).clamp(max=0)
            scale = (groups.amax(2, keepdim=True).clamp(min=0) - low).clamp(min=1e-30) / 15
            zero = (-low / scale).round()
        else:
            scale = groups.abs().amax(2, keepdim=True).clamp(min=1e-30) / 7
            zero = torch.full_like(scale, 8.0)
        values = ((groups / scale).round() + zero).clamp(0, 15).flatten(1).byte()
        zeros = zero.squeeze(2).byte() if self._zero_points else None
        linear = self._ops.gated_linear("linear_int4", gate)
        return linear(values, scale.squeeze(2), zeros, bias, dtype=weight.dtype)


class Unrotated(RoundToNearest):
    """`int4` of inputs as they are: the effect of their rotation."""

    def __init__(self, ops: OpSet) -> None:
        super().__init__(ops, zero_points=True)

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        linear = self._ops.gated_linear("linear_int4", gate)
        return linear(*quantize_int4(weight), bias, dtype=weight.dtype)


def variants(ops: OpSet) -> Iterator[Variant]:
    """The unquantized model first. The bundled model's 704 inputs are no multiple of 128: there
    groups of 128 fall back to 64."""
    plain, int8 = PlainFormat(ops), Int8Format(ops)
    yield Variant("none", [(1, plain)], plain)
    yield Variant("int8", [(1, int8)], int8)
    unrotated = Int8Format(ops, rotation=1)
    yield Variant("int8, not rotated", [(1, unrotated)], unrotated)
    for zero_points in (False, True):
        kind = "zero points" if zero_points else "symmetric"
        for size in (32, 64, 128):
            body = [
                (group, Int4Format(ops, group, zero_points=zero_points))
                for group in (size, 64, 32)
                if group <= size
            ]
            yield Variant(f"int4, groups of {size}, {kind}", body, int8)
    name = "int4, groups of 32, zero points, not rotated"
    yield Variant(name, [(32, Unrotated(ops))], unrotated)
    int4 = Int4Format(ops)
    for name, head in (("in int4", int4), ("as it is", plain)):
        yield Variant(f"int4, groups of 32, zero points, head {name}", [(32, int4)], head)
    for zero_points, name in ((False, "max|w| / 7"), (True, "(max - min) / 15")):
        rounded = RoundToNearest(ops, zero_points=zero_points)
        yield Variant(f"int4, groups of 32, {name}", [(32, rounded)], int8)


class Reader:
    """A model in one variant, reading a window as one sequence. kv_dtype: dtype of its cache."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        factory: LayerFactory,
        backend: AttentionBackend,
        kv_dtype: str,
    ) -> None:
        self._model: CausalLM = load_model(spec, folder, factory, progress=False)
        self._backend = backend
        blocks = -(-WINDOW // BLOCK_SIZE)
        layout = KVLayout.of_model(spec, BLOCK_SIZE, kv_dtype)
        dtype: torch.dtype = getattr(torch, kv_dtype)
        self._kv = KVPool.allocate(layout, blocks, dtype, torch.device("cpu"))

    def log_probabilities(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), V] of the token after each."""
        count = len(ids)
        starts = torch.tensor([0, count], dtype=torch.int32)
        lengths = torch.tensor([count], dtype=torch.int32)
        table = torch.arange(-(-count // BLOCK_SIZE), dtype=torch.int32)[None]
        positions = torch.arange(count)
        plan = self._backend.plan(starts, lengths, table, None)
        groups = (GroupInputs(table, positions, None, plan),)
        step = StepInputs(starts, lengths, count, count, groups, self._kv)
        hidden = self._model.forward(torch.tensor(ids, dtype=torch.int32), positions, step)
        return self._model.logits(hidden).log_softmax(1)


def windows(documents: Sequence[Any], tokenizer: Tokenizer, max_bytes: int) -> list[Window]:
    """All of every document, after a BOS; with max_bytes only the beginning of each."""
    found: list[Window] = []
    for document in documents:
        text = document.text[: max_bytes or None]
        ids = [BOS, *tokenizer.encode(text, add_special_tokens=False)]
        done = 0
        while done < len(ids) - 1:
            begin = max(0, done - CONTEXT)
            part = ids[begin : begin + WINDOW + 1]
            new = begin + len(part) - 1 - done
            found.append(Window(part, new))
            done += new
    return found


def score(window: Window, reference: torch.Tensor, got: torch.Tensor) -> Scores:
    """reference, got: log-probabilities [T, V] of the window, of the two models."""
    reference, got = reference[-window.new :], got[-window.new :]
    truth = torch.tensor(window.ids[-window.new :])[:, None]
    return Scores(
        bits=-float(got.gather(1, truth).sum()) / math.log(2),
        divergence=float((reference.exp() * (reference - got)).sum()),
        agreed=float((reference.argmax(1) == got.argmax(1)).sum()),
        count=window.new,
    )


def figures(name: str, scores: Sequence[Scores], plain_bits: float, size: int) -> dict[str, Spread]:
    """Return the figures of one variant by name. size: length of the text in bytes."""
    tokens = sum(each.count for each in scores)
    bits = sum(each.bits for each in scores)
    agreement = [each.agreed / each.count for each in scores]
    divergence = [each.divergence / each.count for each in scores]
    error = math.sqrt(len(scores))
    values = {
        "bits per byte": bits / size,
        "more bits per byte": (bits - plain_bits) / size,
        "perplexity per token": 2 ** (bits / tokens),
        "top-1 agreement": sum(each.agreed for each in scores) / tokens,
        "top-1 agreement, standard error": statistics.stdev(agreement) / error,
        "KL": sum(each.divergence for each in scores) / tokens,
        "KL, standard error": statistics.stdev(divergence) / error,
    }
    return {f"{name}: {label}": spread_of([value]) for label, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--max-bytes", type=int, default=0, help="of each file; 0: all of them (0)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sys.path.insert(0, str(TOOLS))
    from corpus import load_corpus

    torch.set_num_threads(options.threads)
    platform, folder, corpus = detect_platform(), bundled_model_path(), load_corpus()
    startup = plan_startup(EngineSettings(model=str(folder)), platform)
    spec, team = startup.resolved.spec, Team(options.threads)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    ops = build_op_set(platform, {}, team)
    needs = AttentionNeeds(dtype, dtype, spec.head_dim, spec.num_heads, spec.num_kv_heads)
    backend = select_backend(platform, needs, None, team).backend
    by_layer = dict.fromkeys(range(spec.num_layers), backend)
    todo = windows(corpus.held_out, Tokenizer.from_folder(folder), options.max_bytes)
    size = sum(len(d.text[: options.max_bytes or None].encode()) for d in corpus.held_out)
    readers = {
        each.name: Reader(
            spec,
            folder,
            LayerFactory(ops, by_layer, dtype, torch.device("cpu"), WINDOW, each),
            backend,
            spec.dtype,
        )
        for each in variants(ops)
    }
    scores: dict[str, list[Scores]] = {name: [] for name in readers}
    with torch.inference_mode():
        for window in todo:
            reference = readers["none"].log_probabilities(window.ids[:-1])
            for name, reader in readers.items():
                got = reader.log_probabilities(window.ids[:-1])
                scores[name].append(score(window, reference, got))
    plain_bits = sum(each.bits for each in scores["none"])
    found: dict[str, Spread] = {}
    for name, of_variant in scores.items():
        values = figures(name, of_variant, plain_bits, size)
        found |= values
        print(f"{name:46s}", *(f"{spread.median:.5f}" for spread in values.values()))
    if options.output:
        record = new_record(
            "quantization_quality",
            command_line(),
            startup.resolved,
            None,
            seed=0,
            workload={
                "held_out_files": [document.name for document in corpus.held_out],
                "bytes": size,
                "windows": len(todo),
                "tokens": sum(window.new for window in todo),
                "corpus_sha256": corpus.sha256,
                "operations": dict(ops.chosen),
            },
            figures=found,
        )
        record.save(options.output)


if __name__ == "__main__":
    main()

"""Layer groups with needs of their own: other widths of K and V, windows, bidirectional prompts.

A toy model on the real engine, beside its formula without a cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.platform import detect_platform
from quire.compute.attention import AttentionBackend, AttentionNeeds, GroupBackends, StepInputs
from quire.compute.attention.kernels import KernelAttention
from quire.compute.attention.reference import ReferenceAttention
from quire.compute.attention.select import BACKENDS
from quire.compute.attention.splittable import AttentionCall, SplittableAttention
from quire.compute.layers import LayerFactory
from quire.compute.models import dummy, loader
from quire.compute.models.weight_map import WeightMap
from quire.compute.runner import RowTable
from quire.compute.worker import load as load_module
from quire.compute.worker import worker as worker_module
from quire.config import ModelSpec
from quire.config.kv_layout import KVFormat, KVLayout, LayerKV, group_layers
from tests.models.families import CASES, write_checkpoint
from tests.runner.late_device import keep_rows_on_device
from tests.runner.test_graphs import Recorded, at_once, graphs_of, never

LATENT = KVFormat(1, key_dim=7, value_dim=5, dtype_bytes=4, num_planes=1)
FULL = KVFormat.plain(2, 8, "float32")
WINDOW = 6
SCALE = 0.4
"""On q·k of the latent layers."""

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "quiet": True,
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "num_kv_blocks": 96,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "num_threads": 1,
}
PROMPTS = [[5, 6, 7], [9, 3] * 10, list(range(40, 62)), [8]]
"""Longer than a step, than a block of either group, and of one token."""

Mask = Callable[[int, int], torch.Tensor]
"""Function from the lengths of a sequence and its prompt to the keys that queries see, [T, T]."""


def causal(length: int, num_prompt: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def windowed(length: int, num_prompt: int) -> torch.Tensor:
    return causal(length, num_prompt).triu(1 - WINDOW)


def whole_prompt(length: int, num_prompt: int) -> torch.Tensor:
    seen = causal(length, num_prompt)
    seen[:num_prompt, :num_prompt] = True
    return seen


class PlainBlock:
    """Attention by the factory, with K and V of one width."""

    query = latent = None

    def __init__(self, spec: ModelSpec, layer: int, make: LayerFactory) -> None:
        self.norm = make.rms_norm(spec.hidden_size, spec.norm_eps)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention = make.attention(layer, heads)
        self.qkv = make.qkv_linear(spec.hidden_size, self.attention, self.norm, bias=False)
        self.output = make.row(spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)
        self._heads = heads

    def attend(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        return self.attention(self.qkv(x), positions, step)

    def dense(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim = self._heads
        qkv = self.qkv(x).view(len(x), -1, head_dim).transpose(0, 1)
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads])
        k, v = (each.repeat_interleave(num_heads // num_kv_heads, dim=0) for each in (k, v))
        return attention(q, k, v, mask, head_dim**-0.5)


class LatentBlock:
    """Attention over one plane, whose first elements are V."""

    qkv = None

    def __init__(self, spec: ModelSpec, layer: int, make: LayerFactory) -> None:
        self.norm = make.rms_norm(spec.hidden_size, spec.norm_eps)
        self.query = make.column(spec.hidden_size, spec.num_heads * LATENT.key_dim, bias=False)
        self.latent = make.replicated(spec.hidden_size, LATENT.key_dim, bias=False)
        self.output = make.row(spec.num_heads * LATENT.value_dim, spec.hidden_size, bias=False)
        self._layer = layer
        self._backend: AttentionBackend = make._backends[layer]

    def attend(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        del positions
        cache, group = step.kv.layers[self._layer], step.groups[step.kv.groups[self._layer]]
        block_size = cache.k.shape[1]
        at = group.slot_mapping // block_size, group.slot_mapping % block_size
        cache.k[at[0], at[1], 0] = self.latent(x)
        q = self.query(x).view(len(x), -1, LATENT.key_dim)
        out = self._backend.run(q, cache, SCALE, step, group)
        assert out.shape == (*q.shape[:2], LATENT.value_dim)
        return out.flatten(1)

    def dense(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.query(x).view(len(x), -1, LATENT.key_dim).transpose(0, 1)
        k = self.latent(x).expand(len(q), -1, -1)
        return attention(q, k, k[..., : LATENT.value_dim], mask, SCALE)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [H, T, Dk], k [H, T, Dk], v [H, T, Dv] → [T, H · Dv], by torch."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, scale=scale
    )
    return out[0].transpose(0, 1).flatten(1)


class ToyModel:
    """`CausalLM` of attention alone. blocks: makers of the blocks."""

    weight_map = WeightMap(
        prefix="",
        outer={"embed": "embed", "norm": "norm"},
        blocks="{}.",
        block={
            **{name: f"qkv:{name}" for name in "qkv"},
            **{name: name for name in ("norm", "query", "latent", "output")},
        },
        embedding="embed.weight",
    )

    def __init__(self, blocks: Sequence[Callable[..., Any]], spec: ModelSpec, make: LayerFactory):
        size = spec.hidden_size
        self.embed, self.head = make.embedding_and_head(spec.vocab_size, size, tied=False)
        self.lm_head = self.head
        self.blocks = [block(spec, layer, make) for layer, block in enumerate(blocks)]
        self.norm = make.rms_norm(size, spec.norm_eps)
        self._wanted = [
            make.wanted_tokens(is_last=layer == len(blocks) - 1) for layer in range(len(blocks))
        ]
        self.eps = spec.norm_eps

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        x, residual = self.embed(token_ids), None
        for block, wanted in zip(self.blocks, self._wanted, strict=True):
            x, residual = block.norm.add(x, residual)
            x, residual = wanted(block.attend(x, positions, step), residual, step)
            x = block.output(x)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def dense(self, token_ids: Sequence[int], num_prompt: int, masks: Sequence[Mask]) -> Any:
        """Log-probabilities [T, V] by the formula, all tokens at once."""
        x = self.embed(torch.tensor(token_ids, dtype=torch.int32))
        for block, mask in zip(self.blocks, masks, strict=True):
            normed = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            x = x + block.output(block.dense(normed, mask(len(x), num_prompt)))
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.logits(x).log_softmax(-1)


class Toys:
    """Starts engines over toy models."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self.engines: list[LLM] = []

    def prepare(self, layers: Sequence[LayerKV], *, bidirectional: bool = False) -> Path:
        """A folder from which such a model starts, whatever it says."""
        set_attribute = self._monkeypatch.setattr
        blocks = [LatentBlock if layer.kind == "latent" else PlainBlock for layer in layers]
        layout = KVLayout(group_layers(layers, 4), 4)
        set_attribute(KVLayout, "of_model", lambda *_: layout)
        set_attribute(loader, "find_model", lambda _: partial(ToyModel, blocks))
        set_attribute(dummy, "SCALE", 0.35)  # so that scores differ
        if bidirectional:
            load = worker_module.load

            def changed(settings: Any, *args: Any) -> Any:
                spec = replace(settings.spec, prompt_attention="bidirectional")
                return load(replace(settings, spec=spec), *args)

            set_attribute(worker_module, "load", changed)
        write_checkpoint(next(case for case in CASES if case.name == "llama"), self._folder)
        return self._folder

    def start(self, folder: Path, **settings: Any) -> LLM:
        self.engines.append(LLM(str(folder), **{**SETTINGS, **settings}))
        return self.engines[-1]


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toys]:
    made = Toys(tmp_path, monkeypatch)
    yield made
    for engine in made.engines:
        engine.shutdown()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    engines = Recorded(monkeypatch)
    yield engines
    for engine in engines.engines:
        engine.shutdown()


def loaded_of(llm: LLM) -> Any:
    client: Any = llm.engine.client
    return client._core._executor._worker._loaded


def check(llm: LLM, masks: Sequence[Mask], prompts: Sequence[list[int]] = PROMPTS) -> None:
    """Greedy tokens are the likeliest by the formula, and log-probabilities those that it gives, of
    the prompt too."""
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    model = loaded_of(llm).model
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None, output.error
        drawn = list(output.outputs[0].token_ids)
        tokens = [*prompt, *drawn]
        with torch.inference_mode():
            expected = model.dense(tokens, len(prompt), masks)[:-1]
        assert drawn == expected[len(prompt) - 1 :].argmax(-1).tolist()
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        told = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        got = [each[token].logprob for each, token in zip(told, tokens[1:], strict=True)]
        wanted = expected[torch.arange(len(got)), torch.tensor(tokens[1:])]
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=1e-4, atol=1e-4)


FULL_AND_LATENT = (LayerKV(FULL), LayerKV(LATENT, "latent"))
FULL_AND_WINDOW = (LayerKV(FULL), LayerKV(FULL, "window", WINDOW))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_latent_group_is_served_beside_a_full_one(toys: Toys, depth: int) -> None:
    """In chunks, with prefix hits, and 8 tokens of one group in a block beside 4 of the other.
    Turns red when a layer gets another group's backend, cache or table, or a result the width of
    the queries."""
    llm = toys.start(toys.prepare(FULL_AND_LATENT), depth=depth)
    assert [group.tokens_per_block for group in group_layers(FULL_AND_LATENT, 4)] == [4, 8]
    check(llm, (causal, causal))
    again = [*PROMPTS[2][:17], 1, 2, 3]
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for prompt in (PROMPTS[2], again):  # which asks for nothing that cached tokens lack
        (output,) = llm.generate([{"prompt_token_ids": prompt}], plain, use_tqdm=False)
        drawn = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            dense = loaded_of(llm).model.dense([*prompt, *drawn], len(prompt), (causal, causal))
        assert drawn == dense[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_layers_of_both_kinds_have_kernels(toys: Toys) -> None:
    """Turns red when latent layers take the slow path, or the report does not name the backend."""
    llm = toys.start(toys.prepare((*FULL_AND_LATENT, *FULL_AND_LATENT)))
    loaded = loaded_of(llm)
    first, second = loaded.attention.backends
    told = loaded.kernels
    if first.name == "reference":
        pytest.skip("no kernels serve here")
    assert isinstance(first, KernelAttention)
    assert isinstance(second, KernelAttention)
    assert second.name == first.name
    assert f"attention: {first.name} (best that serves here); " in told
    assert re.search(r"; all \d+ other operations by \w+$", told), "the names make a long line"


def test_groups_on_two_kernels_are_captured_together(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph of decode steps, and in one of prompts. Turns red when a replay calls the kernel
    of another group."""
    names = [
        name
        for name in ("cpu_avx2", "cpu_avx512", "cpu_avx512_bf16")
        if BACKENDS[name].refusal(detect_platform(), needs_of_toys()) is None
    ]
    if len(names) < 2:
        pytest.skip("the processor has kernels of one instruction set")

    def choose(*args: Any, **_: Any) -> GroupBackends:
        team = args[4]
        return GroupBackends(tuple(BACKENDS[name].make(team) for name in names[:2]), "as told")

    monkeypatch.setattr(load_module, "select_backends", choose)
    calls: list[str] = []
    run = KernelAttention.run

    def counted(self: KernelAttention, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(self.name)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(KernelAttention, "run", counted)
    llm = toys.start(toys.prepare(FULL_AND_WINDOW))
    client: Any = llm.engine.client
    runner = client._core._executor._worker._assembly.runner
    assert runner._forward._model.graphs is not None, "prompts are not captured"
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    first = llm.generate(prompts, params, use_tqdm=False)
    assert set(calls) == set(names[:2])
    calls.clear()
    again = llm.generate(prompts, params, use_tqdm=False)
    assert not calls, "a step was computed without its graph"
    assert [each.outputs[0].token_ids for each in again] == [
        each.outputs[0].token_ids for each in first
    ]
    check(llm, (causal, windowed))


@pytest.mark.parametrize("layers", [FULL_AND_LATENT, FULL_AND_WINDOW], ids=["latent", "window"])
def test_graphs_on_a_device_take_a_backend_for_each_group(
    toys: Toys, recorded: Recorded, layers: tuple[LayerKV, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in pieces. Turns red when a graph asks one group's attention for another, or reads
    a result where queries lie, which are wider."""
    asked: list[tuple[int, SplittableAttention]] = []
    compute = SplittableAttention.compute

    def noted(self: SplittableAttention, call: AttentionCall, step: StepInputs) -> torch.Tensor:
        asked.append((call.group, self))
        return compute(self, call, step)

    monkeypatch.setattr(SplittableAttention, "compute", noted)
    folder = toys.prepare(layers)
    masks = (causal, causal if layers is FULL_AND_LATENT else windowed)
    eager = recorded.start(folder, load_format="dummy")
    for graphs in graphs_of(eager):
        never(graphs)
    check(eager, masks)
    graphed = recorded.start(folder, load_format="dummy")
    for graphs in graphs_of(graphed):
        at_once(graphs)
    check(graphed, masks)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    expected, got = (llm.generate(prompts, plain, use_tqdm=False) for llm in (eager, graphed))
    assert [each.outputs[0].token_ids for each in got] == [
        each.outputs[0].token_ids for each in expected
    ]
    assert recorded.recorders[-1].num_graphs > 0
    assert all(graphs.recorded for graphs in graphs_of(graphed))
    backends = loaded_of(graphed).attention.backends
    assert {group for group, _ in asked} == {0, 1}
    assert all(backend is backends[group] for group, backend in asked)


BIDIRECTIONAL: dict[str, Any] = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}


@pytest.mark.parametrize("on_device", [False, True], ids=["host rows", "device rows"])
@pytest.mark.parametrize("layers", [FULL_AND_LATENT, (LayerKV(FULL),) * 2], ids=["latent", "full"])
def test_a_prompt_sees_itself_as_a_whole(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, layers: tuple[LayerKV, ...], on_device: bool
) -> None:
    """The result equals torch without a cache, beside other prompts and rows that decode. Tokens
    after a prompt are causal. Turns red when a chunk or a neighbour decides a token's last key."""
    folder = toys.prepare(layers, bidirectional=True)
    if on_device:
        keep_rows_on_device(monkeypatch)
        load = worker_module.load

        def changed(settings: Any, *args: Any) -> Any:
            spec = replace(settings.spec, prompt_attention="bidirectional")
            return load(replace(settings, spec=spec), *args)

        monkeypatch.setattr(worker_module, "load", changed)
    llm = toys.start(folder, **BIDIRECTIONAL)
    assert loaded_of(llm).whole_prompts
    check(llm, (whole_prompt, whole_prompt))
    kinds = {type(each) for each in loaded_of(llm).attention.backends}
    if layers is not FULL_AND_LATENT and not on_device and kinds != {ReferenceAttention}:
        client: Any = llm.engine.client
        runner = client._core._executor._worker._assembly.runner
        assert runner._forward._model.graphs is not None, "prompts are not captured"


def test_causal_models_take_no_last_key(toys: Toys) -> None:
    """Turns red when causal attention pays for what it does not use."""
    llm = toys.start(toys.prepare(FULL_AND_LATENT))
    client: Any = llm.engine.client
    inputs = client._core._executor._worker._assembly.runner._decode._inputs
    assert not inputs.buffers(3, 1).last_keys


def test_a_prompt_that_is_cut_fails_alone(toys: Toys) -> None:
    """The budget of a step cuts it, or a prefix hit. Turns red when tokens are computed that have
    not seen the rest of their prompt."""
    folder = toys.prepare((LayerKV(FULL),) * 2, bidirectional=True)
    llm = toys.start(folder)
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    short, long = [7] * 9, list(range(20, 50))
    first, cut = llm.generate([short, long], plain, use_tqdm=False)
    assert first.error is None
    assert "max_num_batched_tokens" in str(cut.error)
    (hit,) = llm.generate([[*short, 1, 2]], plain, use_tqdm=False)
    assert "enable_prefix_caching" in str(hit.error)
    (fresh,) = llm.generate([[1, 2, 3]], plain, use_tqdm=False)
    assert fresh.error is None


@pytest.mark.parametrize(
    ("num_computed", "standing", "is_cut"),
    [(0, 9, False), (0, 29, False), (0, 8, True), (8, 1, True), (8, 21, True), (9, 20, False)],
)
def test_rows_know_which_prompts_are_cut(num_computed: int, standing: int, is_cut: bool) -> None:
    """The prompt has 9 tokens, with 20 outputs behind them. Turns red when a row that resumes on a
    cached prefix counts its outputs as the rest of its prompt."""
    rows = RowTable(2, 40, [4])
    rows.num_prompt[1], rows.num_tokens[1] = 9, 29
    rows.num_computed[1], rows.standing[1] = num_computed, standing
    assert rows.cut_prompts().tolist() == [1] * is_cut
    rows.standing[1] = 0
    assert not len(rows.cut_prompts())


def needs_of_toys() -> AttentionNeeds:
    return AttentionNeeds(torch.float32, torch.float32, 8, 4, 2)

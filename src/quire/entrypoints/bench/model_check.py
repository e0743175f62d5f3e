"""The findings of `quire check-model`: whether a model gives the logits of `transformers`, and
where it first gives others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.config import ModelSpec
from quire.config.families.generic import has_transformers
from quire.config.gguf import is_gguf
from quire.config.hf import read_json
from quire.config.media.images import reads_images
from quire.config.model_spec import GenericTraits
from quire.config.settings import EngineSettings
from quire.config.startup import StartupPlan, find_model, plan_startup
from quire.entrypoints.bench.stepped_model import Sequences, SteppedModel, Traced, decoder_layers
from quire.ops.native.binding import see_kernels

__all__ = ["TOLERANCES", "ModelCheck", "PassCheck", "check_model", "render_check"]

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
)
"""Largest difference that counts as equal, relative to the largest number of the reference. In
float32 sums in another order differ by about 1e-6; in 16 bits `transformers` rounds too."""

CHUNKS = (5, 1, 8, 3, 1, 11)
"""Tokens that sequences take per step of the chunked pass."""


@dataclass(frozen=True, slots=True)
class PassCheck:
    """One way to feed the sequences. error: the largest difference of logits, relative to the
    largest logit. sequence, token: place where the error first exceeds the tolerance, or is
    largest. layer: the first layer behind which the residual stream differs, -1 for the embeddings,
    the number of layers for the part behind the last one, None if nothing differs. layer_error:
    error there."""

    name: str
    error: float
    sequence: int
    token: int
    layer: int | None
    layer_error: float


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """is_generic: `transformers` computed all but attention on both sides. kernels: kernels that
    computed. windows: the sliding windows of the model's layers that no sequence outgrew, so that
    they were not tested."""

    architecture: str
    dtype: str
    num_layers: int
    is_generic: bool
    kernels: str
    tolerance: float
    num_tokens: tuple[int, ...]
    windows: tuple[int, ...]
    passes: tuple[PassCheck, ...]

    @property
    def ok(self) -> bool:
        """True if the logits of all passes are equal."""
        return all(each.layer is None for each in self.passes)

    def as_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return {"ok": self.ok, **asdict(self)}


NOT_COMPARED = ("enable_lora", "speculative_config", "tensor_parallel_size", "data_parallel_size")
"""Settings of which the comparison would say nothing: one process computes logits alone."""


def check_model(
    settings: EngineSettings, num_tokens: int = 64, tolerance: float | None = None, seed: int = 0
) -> ModelCheck:
    """Compare the model of `settings` with `transformers` on sequences of random tokens, the
    longest of `num_tokens`.

    In float32 unless `settings` names a dtype. tolerance: see TOLERANCES, which has the default.
    Raises ConfigError if one of both cannot load the model, if a setting asks for what is not
    compared, or if `transformers` is not installed.
    """
    for name in NOT_COMPARED:
        if getattr(settings, name) != getattr(EngineSettings(), name):
            raise ConfigError(f"{name} has no part in this comparison: leave it out")
    plan = _plan(settings, num_tokens)
    spec, dtype = plan.resolved.spec, plan.resolved.settings.dtype
    if spec.prompt_attention is not None:
        raise ConfigError(f"{plan.folder}: attention in both directions is not compared")
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    generator = random.Random(seed)
    sequences = {
        seq: [generator.randrange(spec.vocab_size) for _ in range(length)]
        for seq, length in enumerate(_lengths(num_tokens))
    }
    wanted = _reference(plan.folder, dtype, spec, sequences)
    model = SteppedModel(plan, _lengths(num_tokens))
    passes: list[PassCheck] = []
    for name, steps in PASSES.items():
        model.reset()
        found = _run(model, steps(sequences))
        passes.append(_compare(name, found, wanted, tolerance))
    return ModelCheck(
        architecture=spec.architecture,
        dtype=dtype,
        num_layers=spec.num_layers,
        is_generic=isinstance(spec.traits, GenericTraits),
        kernels=model.kernels,
        tolerance=tolerance,
        num_tokens=_lengths(num_tokens),
        windows=tuple(sorted({w for w in spec.windows if w is not None and w >= num_tokens})),
        passes=tuple(passes),
    )


def render_check(found: ModelCheck) -> str:
    """A page of text; the last line is the verdict."""
    by = ", computed by transformers but for attention" if found.is_generic else ""
    lines = [
        f"model         {found.architecture}, {found.num_layers} layers, {found.dtype}{by}",
        f"kernels       {found.kernels}",
        f"sequences     {', '.join(map(str, found.num_tokens))} random tokens",
    ]
    lines += [f"{each.name:<13} {_verdict(each, found)}" for each in found.passes]
    if found.windows:
        shown = ", ".join(map(str, found.windows))
        lines.append(f"not tested    windows of {shown} tokens: give more with --num-tokens")
    wrong = [each.name for each in found.passes if each.layer is not None]
    lines.append(
        f"logits differ from those of transformers: {', '.join(wrong)}"
        if wrong
        else "logits equal those of transformers"
    )
    return "\n".join(lines)


def _verdict(found: PassCheck, whole: ModelCheck) -> str:
    if found.layer is None:
        return f"equal, within {found.error:.1e} of the largest logit"
    if found.layer < 0:
        place = f"in the embeddings, by {found.layer_error:.1e}"
    elif found.layer == whole.num_layers:
        place = "behind the last layer: in the final norm, the head, or what is done to logits"
    else:
        place = f"behind layer {found.layer} of 0 to {whole.num_layers - 1}"
        place += f", by {found.layer_error:.1e}"
    return (
        f"DIFFERS by {found.error:.1e} of the largest logit, at token {found.token} of sequence "
        f"{found.sequence}; first {place}"
    )


def _lengths(num_tokens: int) -> tuple[int, ...]:
    """One of the sequences is a single token, and none ends where another does."""
    return (num_tokens, 1, max(2, num_tokens // 2 - 3), max(2, num_tokens // 5))


def _plan(settings: EngineSettings, num_tokens: int) -> StartupPlan:
    if not has_transformers():
        raise ConfigError(
            "quire check-model compares with transformers, which is not in quire's environment: "
            "pip install 'transformers>=5.24,<6'"
        )
    found = find_model(settings)
    if is_gguf(found.folder):
        raise ConfigError(
            f"{found.folder}: a GGUF file is not compared; `quire convert` it to a folder first"
        )
    if num_tokens > found.spec.max_context:
        raise ConfigError(
            f"num_tokens={num_tokens} must be at most {found.spec.max_context}, the context of "
            f"{found.folder}"
        )
    return plan_startup(
        replace(
            settings,
            dtype="float32" if settings.dtype == "auto" else settings.dtype,
            max_model_len=num_tokens,
            enforce_eager=True,
            quiet=True,
        ),
        see_kernels(detect_platform()),
    )


def _whole(sequences: Sequences) -> Iterator[Sequences]:
    """All sequences at once."""
    yield sequences


def _token_by_token(sequences: Sequences) -> Iterator[Sequences]:
    """Half of each sequence, then one token of every sequence per step."""
    halves = {seq: len(tokens) // 2 for seq, tokens in sequences.items()}
    yield {seq: tokens[: halves[seq]] for seq, tokens in sequences.items()}
    for offset in range(max(map(len, sequences.values()))):
        yield {
            seq: tokens[halves[seq] + offset : halves[seq] + offset + 1]
            for seq, tokens in sequences.items()
        }


def _in_chunks(sequences: Sequences) -> Iterator[Sequences]:
    """Chunks of uneven sizes; sequences begin one step after the other."""
    done, step = dict.fromkeys(sequences, 0), 0
    while any(done[seq] < len(tokens) for seq, tokens in sequences.items()):
        batch: dict[int, list[int]] = {}
        for seq, tokens in sequences.items():
            if step >= seq:
                size = CHUNKS[(step + seq) % len(CHUNKS)]
                batch[seq] = list(tokens[done[seq] : done[seq] + size])
                done[seq] += len(batch[seq])
        step += 1
        yield batch


PASSES: Mapping[str, Callable[[Sequences], Iterator[Sequences]]] = MappingProxyType(
    {"prefill": _whole, "decode": _token_by_token, "chunked": _in_chunks}
)
"""Ways to feed the sequences, by name."""


def _run(model: SteppedModel, steps: Iterator[Sequences]) -> Traced:
    pieces: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for step in steps:
        batch = {seq: tokens for seq, tokens in step.items() if tokens}
        if batch:
            for seq, piece in model.step(batch).items():
                pieces.setdefault(seq, []).append(piece)
    return {
        seq: (torch.cat([logits for logits, _ in found]), torch.cat([s for _, s in found], dim=1))
        for seq, found in pieces.items()
    }


def _compare(name: str, found: Traced, wanted: Traced, tolerance: float) -> PassCheck:
    error, sequence, token = 0.0, 0, 0
    for seq, (logits, _) in wanted.items():
        errors = _errors(found[seq][0], logits)  # by token
        over = (errors > tolerance).nonzero()
        at = int(over[0]) if len(over) else int(errors.argmax())
        if float(errors.max()) > error:
            error, sequence, token = float(errors.max()), seq, at
    if error <= tolerance:
        return PassCheck(name, error, sequence, token, None, 0.0)
    num_layers = len(next(iter(wanted.values()))[1]) - 1
    for place in range(num_layers + 1):
        layer_error = max(
            float(_errors(found[seq][1][place], states[place]).max())
            for seq, (_, states) in wanted.items()
        )
        if layer_error > tolerance:
            return PassCheck(name, error, sequence, token, place - 1, layer_error)
    return PassCheck(name, error, sequence, token, num_layers, 0.0)


def _errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The largest difference in each row, relative to the largest number of all; [n]. A number that
    is none is infinitely wrong."""
    differences = (found - wanted).abs().amax(-1) / wanted.abs().max().clamp(min=1e-30)
    return differences.nan_to_num(nan=torch.inf)


def _reference(folder: Path, dtype: str, spec: ModelSpec, sequences: Sequences) -> Traced:
    """Run `transformers` on the CPU, one sequence at a time. Raises ConfigError with its reason if
    it cannot."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_for_images = not is_gguf(folder) and reads_images(read_json(folder / "config.json"))
    kind: Any = AutoModelForImageTextToText if is_for_images else AutoModelForCausalLM
    try:
        loaded: Any = kind.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            # Others leave out caps and sinks. Falcon's eager one adds ALiBi twice.
            attn_implementation="sdpa" if spec.model_type == "falcon" else "eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise ConfigError(
            f"{folder}: transformers cannot load it: {type(error).__name__}: {error}"
        ) from error
    model, info = loaded
    if missing := sorted(map(str, info.get("missing_keys") or ())):
        raise ConfigError(
            f"{folder}: transformers does not find {len(missing)} tensors, such as {missing[0]!r}"
        )
    model.eval()
    found: Traced = {}
    with torch.inference_mode():
        for seq, tokens in sequences.items():
            with _stream_of(model, spec.num_layers) as states:
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
            found[seq] = logits, torch.stack([state.flatten(0, -2) for state in states])
    return found


@contextmanager
def _stream_of(model: nn.Module, num_layers: int) -> Iterator[list[torch.Tensor]]:
    """The residual stream of a forward: before the first layer, and behind each one."""
    states: list[torch.Tensor] = []
    layers = decoder_layers(model, num_layers)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append((args[0] if args else kwargs["hidden_states"]).float())

    def behind(_: nn.Module, __: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).float())

    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(behind) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()

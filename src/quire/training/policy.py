"""The weights of an engine as parameters of torch, and its log-probabilities as their function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.autograd.function import once_differentiable

from quire.base.errors import ConfigError, RequestError
from quire.config.hf import StoredTensor
from quire.config.hub import resolve_model_folder
from quire.engine.convert import copy_rest, new_checkpoint
from quire.entrypoints.llm import LLM
from quire.protocol.outputs import CompletionOutput
from quire.protocol.sampling_params import SamplingParams
from quire.training.reference import ReferenceModel

__all__ = ["PolicyModel", "sampled_log_probs"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Stamp = tuple[int, tuple[tuple[int, int], ...]]


class PolicyModel(nn.Module):
    """An engine as a module: the forward gives the engine's log-probabilities to the bit, the
    backward the gradient of the plain reference of the same model at the same weights.

    Parameters have the names of the checkpoint. `push` gives them to the engine, which then draws
    with them; a new module has pushed. Ratios of importance on policy are exactly 1.
    """

    def __init__(
        self, llm: LLM, dtype: torch.dtype = torch.float32, backward_tokens: int = 4096
    ) -> None:
        """llm: an engine on a CPU, without quantization. dtype: dtype of the parameters; the engine
        rounds them to its own. backward_tokens: tokens of sequences that a backward holds in memory
        at once.

        Raises ConfigError for an engine whose bits depend on the batch, and for a model that the
        reference cannot differentiate.
        """
        super().__init__()
        _check_engine(llm)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype}: give torch.float32, bfloat16 or float16")
        if backward_tokens < 1:
            raise ConfigError(f"backward_tokens is {backward_tokens}: give a number from 1 on")
        settings = llm.engine.resolved.settings
        assert settings.model is not None, "an engine has a model"
        self._llm = llm
        self._folder = resolve_model_folder(
            settings.model, settings.revision, settings.download_dir
        )
        self._max_length = settings.max_model_len - 1  # a request draws a token behind its prompt
        self._reference = ReferenceModel(
            replace(llm.engine.spec, dtype=settings.dtype),
            self._folder,
            settings.max_model_len,
            backward_tokens,
        )
        for name, info in self._reference.stored.items():
            weight = _read(info).to(dtype, copy=True)
            *path, last = name.split(".")
            _submodule(self, path).register_parameter(last, nn.Parameter(weight))
        self._pushed: Stamp
        self.push()

    def forward(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """Return for each sequence of token ids the natural log-probabilities of its tokens but the
        first, float32 [length − 1], at temperature 1 and without filters.

        Raises RequestError for a sequence of fewer than two tokens, or longer than the engine's
        `max_model_len` − 1, and if parameters have changed since `push`.
        """
        rows = [list(each) for each in sequences]
        self._check(rows)
        if not rows:
            return ()
        names, weights = zip(*self.named_parameters(), strict=True)

        def gradients(
            saved: Sequence[torch.Tensor], wanted: Sequence[bool], outer: torch.Tensor
        ) -> list[torch.Tensor | None]:
            chosen = [name for name, needs in zip(names, wanted, strict=True) if needs]
            given = dict(zip(names, saved, strict=True))
            found = self._reference.gradients(given, chosen, rows, outer)
            return [
                found[name].to(weight.dtype) if name in found else None
                for name, weight in zip(names, saved, strict=True)
            ]

        flat: torch.Tensor = _EngineLogProbs.apply(lambda: self._score(rows), gradients, *weights)
        return flat.split([len(row) - 1 for row in rows])

    def reference(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """Return the same by the reference, without a gradient: the function whose gradient a
        backward gives. Its values differ from the engine's by rounding."""
        rows = [list(each) for each in sequences]
        self._check(rows)
        if not rows:
            return ()
        flat = self._reference.log_probs(dict(self.named_parameters()), rows)
        return flat.split([len(row) - 1 for row in rows])

    def push(self) -> int:
        """Give the parameters to the engine, and return the version number of its weights. Nothing
        that it cached before is hit any more. Raises ConfigError for numbers that are not finite;
        the engine keeps its weights then."""
        weights = {name: weight.detach() for name, weight in self.named_parameters()}
        version = self._llm.update_weights(weights)
        self._pushed = self._stamp()
        return version

    def save(self, folder: str | Path) -> None:
        """Write the parameters, in their dtype, as a new checkpoint folder with the config,
        tokenizer and templates of the one that the engine has loaded. quire and transformers read
        it. Raises ConfigError if the folder is there or cannot be written."""
        with new_checkpoint(self._folder, Path(folder)) as partial:
            weights = {name: _read(info) for name, info in self._reference.beside.items()}
            for name, weight in self.named_parameters():
                weights[name] = weight.detach().contiguous()
            save_file(weights, partial / "model.safetensors", {"format": "pt"})
            config = (self._folder / "config.json").read_bytes()
            (partial / "config.json").write_bytes(config)
            copy_rest(self._folder, partial)

    def _check(self, rows: Sequence[Sequence[int]]) -> None:
        for index, row in enumerate(rows):
            if not 2 <= len(row) <= self._max_length:
                raise RequestError(
                    f"sequence {index} has {len(row)} tokens: give 2 to {self._max_length:,}, or "
                    "start the engine with a larger max_model_len"
                )
        if self._stamp() != self._pushed:
            raise RequestError(
                "the engine does not have these parameters: they, or its weights, have changed "
                "since the last push(). Call push() after each step of the optimizer."
            )

    def _stamp(self) -> Stamp:
        """Return what differs after a change: the version of the engine's weights, and places and
        versions of the parameters."""
        places = tuple((each.data_ptr(), each._version) for each in self.parameters())  # noqa: SLF001
        return self._llm.engine.client.report.weights_version, places

    def _score(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the engine's log-probabilities, float32 [N]."""
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        values: list[float] = []
        for row, output in zip(
            rows, self._llm.generate(prompts, params, use_tqdm=False), strict=True
        ):
            if output.error is not None:
                raise RequestError(output.error)
            assert output.prompt_logprobs is not None, "they were asked for"
            for token, entry in zip(row, output.prompt_logprobs, strict=True):
                if entry is not None:
                    values.append(entry[token].logprob)
        return torch.tensor(values)


def sampled_log_probs(sample: CompletionOutput) -> torch.Tensor:
    """Return the log-probabilities of the tokens of a sample when they were drawn, float32 [tokens]
    in the engine's bits. RequestError if its request had no `logprobs`."""
    if sample.logprobs is None:
        raise RequestError("the sample has no log-probabilities: give SamplingParams(logprobs=0)")
    pairs = zip(sample.token_ids, sample.logprobs, strict=True)
    return torch.tensor([entry[token].logprob for token, entry in pairs])


class _EngineLogProbs(torch.autograd.Function):
    """Values of one function with the gradients of another. Parameters are saved, so autograd
    refuses a backward after they were changed."""

    @staticmethod
    def forward(
        ctx: Any,
        score: Callable[[], torch.Tensor],
        gradients: Callable[..., list[torch.Tensor | None]],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gradients = gradients
        ctx.save_for_backward(*weights)
        return score()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  decorated
        ctx: Any, outer: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        found = ctx.gradients(ctx.saved_tensors, ctx.needs_input_grad[2:], outer)
        return None, None, *found


def _read(info: StoredTensor) -> torch.Tensor:
    """Return a tensor of a checkpoint in memory."""
    with safe_open(info.file, framework="pt") as opened:
        return opened.get_tensor(info.name)


def _submodule(module: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the module of a dotted name, made with those above it where they are missing."""
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module


def _check_engine(llm: LLM) -> None:
    settings, unstable = llm.engine.resolved.settings, llm.engine.facts.unstable
    if unstable:
        raise ConfigError(f"the bits of this engine's log-probabilities are not fixed: {unstable}")
    wanted = {
        "load_format": ("auto", "safetensors"),
        "quantization": (None,),
        "tensor_parallel_size": (1,),
        "logprobs_mode": ("raw_logprobs",),
        "kv_cache_dtype": (settings.dtype,),
    }
    for name, values in wanted.items():
        found = getattr(settings, name)
        if found not in values:
            raise ConfigError(
                f"{name}={found!r}: an engine is trained with {values[0]!r}. Start it without."
            )

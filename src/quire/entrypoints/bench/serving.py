"""`quire bench serve`: streamed requests to a running server, and how long they take."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from quire.base.errors import ConfigError, EngineError, RequestError
from quire.entrypoints.bench.lengths import Lengths, Workload, draw_workload, random_prompts
from quire.entrypoints.bench.serving_figures import ServingFigures, serving_figures
from quire.entrypoints.bench.serving_load import Arrivals, Load, LoadResult, run_load
from quire.entrypoints.bench.serving_stream import AnswerTimes
from quire.entrypoints.client import RemoteServer

__all__ = ["CHAT_PATH", "COMPLETIONS_PATH", "ServingOptions", "ServingRun", "run_serving"]

COMPLETIONS_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SAMPLE_TEXT = " ".join(first + second for first in _LETTERS for second in _LETTERS)
"""Text whose tokens are plain ones in any vocabulary, and some hundreds of different ones."""

_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """path: route to call. model: the name that requests give; None: the server's first. prompts,
    outputs: distributions of lengths in tokens. vocab_size: prompts are any ids below it; None: ids
    that the server's tokenizer gives for plain text. ignore_eos: answers are exactly as long as
    drawn. goals_ms: limits for goodput. repeats: same lengths and arrivals, fresh
    token ids each."""

    path: str
    model: str | None
    prompts: Lengths
    outputs: Lengths
    max_output_len: int | None
    num_prompts: int
    arrivals: Arrivals
    max_concurrency: int | None
    vocab_size: int | None
    ignore_eos: bool
    temperature: float
    extra_body: Mapping[str, Any]
    goals_ms: Mapping[str, float]
    num_warmups: int
    repeats: int
    timeout_s: float
    seed: int
    show_progress: bool


@dataclass(frozen=True, slots=True)
class ServingRun:
    """model: name in the requests. workload: lengths that were drawn. figures: one per repeat."""

    model: str
    workload: Workload
    figures: tuple[ServingFigures, ...]


def run_serving(options: ServingOptions, server: RemoteServer) -> ServingRun:
    """Measure. Raises ConfigError if the lengths do not fit the model, EngineError if nothing
    answers or every request fails."""
    model = _find_model(server, options.model)
    name = str(model["id"])
    workload = draw_workload(
        options.prompts,
        options.outputs,
        options.num_prompts,
        options.seed,
        model.get("max_model_len") or _NO_LIMIT,
        options.max_output_len,
    )
    prompts = _PromptMaker(options, server, name)
    arrivals = options.arrivals.times(options.num_prompts, options.seed)
    _warm_up(options, server, prompts, workload)
    found: list[ServingFigures] = []
    for repeat in range(options.repeats):
        bodies = prompts.bodies(workload, options.seed + 1 + repeat)
        load = _load(options, server, bodies, arrivals, options.max_concurrency)
        found.append(serving_figures(_run_shown(load, options), options.goals_ms))
    return ServingRun(name, workload, tuple(found))


class _PromptMaker:
    """Bodies of requests with random prompts of given lengths."""

    def __init__(self, options: ServingOptions, server: RemoteServer, model: str) -> None:
        self._options = options
        self._server = server
        self._model = model
        self._ids = (
            _plain_ids(server, model)
            if options.vocab_size is None
            else range(options.vocab_size)
        )  # fmt: skip

    def bodies(self, workload: Workload, seed: int) -> list[bytes]:
        """One JSON body per request. Chats get the text of the token ids, which may come out a
        few tokens longer or shorter; the table counts what the server counted."""
        drawn = random_prompts(workload.prompt_lengths, len(self._ids), seed)
        return [
            self._body([self._ids[i] for i in indices], length)
            for indices, length in zip(drawn, workload.output_lengths, strict=True)
        ]

    def _body(self, token_ids: list[int], output_length: int) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": output_length,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.ignore_eos:
            body["ignore_eos"] = True
        if self._options.path == CHAT_PATH:
            asked = {"model": self._model, "tokens": token_ids}
            text = self._server.call("POST", "/detokenize", asked)["prompt"]
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = token_ids
        return json.dumps({**body, **self._options.extra_body}).encode()


def _find_model(server: RemoteServer, wanted: str | None) -> Mapping[str, Any]:
    models = server.wait_for_models(lambda said: print(said, file=sys.stderr))
    for model in models:
        if wanted is None or model.get("id") == wanted:
            return model
    names = ", ".join(str(model.get("id")) for model in models)
    raise RequestError(f"The server at {server.address} has no model {wanted!r}. It has: {names}.")


def _plain_ids(server: RemoteServer, model: str) -> Sequence[int]:
    """Token ids of plain text, in the server's own vocabulary."""
    asked = {"model": model, "prompt": _SAMPLE_TEXT, "add_special_tokens": False}
    try:
        found = server.call("POST", "/tokenize", asked)["tokens"]
    except (RequestError, KeyError) as error:
        raise ConfigError(
            f"The server at {server.address} does not tokenize ({error}), so prompts cannot be "
            "made. Give --vocab-size: prompts are random token ids below it then."
        ) from error
    return sorted(set(found))


def _warm_up(
    options: ServingOptions, server: RemoteServer, prompts: _PromptMaker, workload: Workload
) -> None:
    """Requests that do not count. EngineError if one fails: so would the others."""
    count = min(options.num_warmups, options.num_prompts)
    if count == 0:
        return
    some = Workload(workload.prompt_lengths[:count], workload.output_lengths[:count])
    load = _load(options, server, prompts.bodies(some, options.seed), [0.0] * count, None)
    for answer in run_load(load).answers:
        if answer.error is not None:
            raise EngineError(f"A first request to {server.address} failed: {answer.error}")


def _load(
    options: ServingOptions,
    server: RemoteServer,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    max_concurrency: int | None,
) -> Load:
    return Load(
        address=server.address,
        headers=server.headers,
        path=options.path,
        bodies=bodies,
        arrivals=arrivals,
        max_concurrency=max_concurrency,
        timeout_s=options.timeout_s,
    )


def _run_shown(load: Load, options: ServingOptions) -> LoadResult:
    """With a bar that counts requests which have ended."""
    rate = options.arrivals.rate
    text = "all at once" if math.isinf(rate) else f"{rate:g} requests/s"
    with tqdm(total=len(load.bodies), desc=text, disable=not options.show_progress) as bar:

        def ended(_: AnswerTimes) -> None:
            bar.update()

        return run_load(load, ended)

"""Vectors, classes and scores of an engine in this process, in the methods of `LLM`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quire.base.errors import RequestError
from quire.base.foreign import check_foreign
from quire.base.idioms import CALL_ARGUMENTS
from quire.protocol.adapters import AdapterArgument, LoRARequest, adapters_for
from quire.protocol.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.protocol.pooling_params import PoolingParams, class_probabilities, pooling_for
from quire.protocol.scheduling_params import SchedulingParams, scheduling_for

if TYPE_CHECKING:  # methods import what an engine has loaded
    from quire.config.model_spec import ClassesSpec
    from quire.entrypoints.llm_engine import LLMEngine
    from quire.protocol.step import FloatArray
    from quire.text.rendering import Prompt, RenderedPrompt

__all__ = ["VectorCall", "VectorCalls", "VectorMethods"]

logger = logging.getLogger("quire")

PoolingArgument = PoolingParams | Sequence[PoolingParams] | None

SchedulingArgument = SchedulingParams | Sequence[SchedulingParams] | None

Complete = Callable[[Sequence[PoolingRequestOutput], bool], None]
"""Runs steps until these have ended; whether it shows how far it has come."""


@dataclass(frozen=True, slots=True)
class VectorCall:
    """Arguments of calls beside their prompts. params: one for all or one per prompt. scheduling:
    makes one object per prompt, from their number. use_tqdm: progress is shown."""

    params: PoolingArgument
    scheduling: Callable[[int], Sequence[SchedulingParams]]
    lora: AdapterArgument
    use_tqdm: bool


class VectorCalls:
    """A single prompt that cannot be served raises RequestError. In a list only the prompt at fault
    fails: its output has `error` set."""

    def __init__(self, llm_engine: LLMEngine, complete: Complete) -> None:
        self._llm_engine = llm_engine
        self._complete = complete
        self._sentences = llm_engine.engine.sentences

    def encode(self, prompts: object, call: VectorCall) -> list[PoolingRequestOutput]:
        """One vector per prompt, float32 [E]."""
        from quire.text.rendering.lists import as_list

        items, is_single = as_list(prompts)
        params = pooling_for(len(items), call.params)
        return self._run([self._rendered(item) for item in items], params, call, is_single)

    def embed(
        self, prompts: object, prompt_name: str | None, call: VectorCall
    ) -> list[EmbeddingRequestOutput]:
        """The same, with the model's prompt before each text."""
        from quire.text.rendering.lists import as_list

        items, is_single = as_list(prompts)
        before = self._sentences.prompt(prompt_name)
        params = pooling_for(len(items), call.params)
        rendered = [self._rendered(_after(before, item)) for item in items]
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput([] if output.error else output.outputs.data.tolist()),
                output.prompt_token_ids,
                output.finished,
                output.num_cached_tokens,
                output.error,
            )
            for output in self._run(rendered, params, call, is_single)
        ]

    def classify(self, prompts: object, call: VectorCall) -> list[ClassificationRequestOutput]:
        """Probabilities of the model's classes."""
        from quire.text.rendering.lists import as_list

        classes = self._classes()
        items, is_single = as_list(prompts)
        params = pooling_for(len(items), call.params)
        outputs = self._run(
            [self._rendered(item) for item in items], _classifying(params), call, is_single
        )
        found: list[ClassificationRequestOutput] = []
        for output, its in zip(outputs, params, strict=True):
            numbers: FloatArray | None = output.outputs.data
            probs: list[float] = []
            if numbers is not None:
                probs = class_probabilities(numbers, classes.activation, its).tolist()
            found.append(
                ClassificationRequestOutput(
                    output.request_id,
                    ClassificationOutput(probs),
                    output.prompt_token_ids,
                    output.finished,
                    output.num_cached_tokens,
                    output.error,
                )
            )
        return found

    def score(
        self, first: str | Sequence[str], second: str | Sequence[str], call: VectorCall
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one text with each of several, or two lists of one length."""
        is_single = isinstance(first, str) and isinstance(second, str)
        lefts = [first] if isinstance(first, str) else list(first)
        rights = [second] if isinstance(second, str) else list(second)
        if not rights or len(lefts) not in (1, len(rights)):
            raise RequestError(
                f"there are {len(lefts)} texts and {len(rights)} others, which make no pairs: give "
                "one with each of several, or two lists of one length"
            )
        classes = self._llm_engine.engine.spec.classes
        params = pooling_for(len(rights), call.params)
        if classes is None:
            return self._cosines(lefts, rights, params, call, is_single)
        if not classes.gives_scores:
            raise RequestError(
                f"the model has {len(classes.labels)} classes, and only a single number is a "
                "score: classify gives them all"
            )
        pairs = zip(lefts * (len(rights) // len(lefts)), rights, params, strict=True)
        rendered = [self._pair(*pair) for pair in pairs]
        outputs = self._run(rendered, _classifying(params), call, is_single)
        return [
            _scored(output, _pair_score(output, classes, its))
            for output, its in zip(outputs, params, strict=True)
        ]

    def _cosines(
        self,
        lefts: list[str],
        rights: list[str],
        params: Sequence[PoolingParams],
        call: VectorCall,
        is_single: bool,
    ) -> list[ScoringRequestOutput]:
        """Scores of a model that gives each text a vector."""
        every = [replace(each, normalize=True) for each in (*params[: len(lefts)], *params)]
        outputs = self._run([self._rendered(t) for t in (*lefts, *rights)], every, call, is_single)
        found: list[ScoringRequestOutput] = []
        for index, other in enumerate(outputs[len(lefts) :]):
            one = outputs[index % len(lefts)]
            if one.error is not None:
                other.error = one.error
            found.append(_scored(other, None if other.error else _cosine(one, other)))
        return found

    def _classes(self) -> ClassesSpec:
        classes = self._llm_engine.engine.spec.classes
        if classes is None:
            raise RequestError(
                "this model has no classes to sort texts into: use one with a head for them "
                "(…ForSequenceClassification), or ask for vectors"
            )
        return classes

    def _rendered(self, prompt: Prompt) -> RenderedPrompt | RequestError:
        try:
            return self._llm_engine.engine.renderer.render_prompt(prompt)
        except RequestError as error:
            return error

    def _pair(
        self, first: str, second: str, params: PoolingParams
    ) -> RenderedPrompt | RequestError:
        most = params.truncate_prompt_tokens
        if most == -1:
            most = self._llm_engine.engine.resolved.settings.max_model_len
        try:
            return self._llm_engine.engine.renderer.render_pair(first, second, most)
        except RequestError as error:
            return error

    def _run(
        self,
        rendered: Sequence[RenderedPrompt | RequestError],
        params: Sequence[PoolingParams],
        call: VectorCall,
        is_single: bool,
    ) -> list[PoolingRequestOutput]:
        scheduling = call.scheduling(len(rendered))
        adapters = adapters_for(len(rendered), call.lora)
        first_handle = self._llm_engine.next_handle
        try:
            asked = zip(rendered, params, scheduling, adapters, strict=True)
            outputs = [self._admit(*each) for each in asked]
            self._complete(outputs, call.use_tqdm)
        finally:
            self._llm_engine.abort(range(first_handle, self._llm_engine.next_handle))
        for output in outputs:
            if output.error is not None and is_single:
                raise RequestError(output.error)
            if output.error is not None:
                logger.warning("request %s failed: %s", output.request_id, output.error)
        return outputs

    def _admit(
        self,
        rendered: RenderedPrompt | RequestError,
        params: PoolingParams,
        scheduling: SchedulingParams,
        lora: LoRARequest | None,
    ) -> PoolingRequestOutput:
        """Add a prompt; one that is refused becomes an output that says why."""
        from quire.text.rendering import RenderedPrompt

        try:
            if isinstance(rendered, RequestError):
                raise rendered
            rendered = self._llm_engine.adapters.put(rendered, lora)
            return self._llm_engine.add_pooled(rendered, params, scheduling)
        except RequestError as error:
            tokens = rendered.token_ids if isinstance(rendered, RenderedPrompt) else []
            request_id = self._llm_engine.new_request_id()
            return PoolingRequestOutput(
                request_id, PoolingOutput(), tokens, finished=True, error=str(error)
            )


class VectorMethods:
    """The methods of `LLM` that make vectors, classes and scores of prompts."""

    def __init__(self, calls: VectorCalls) -> None:
        self._vectors = calls

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingArgument = None,
        use_tqdm: bool = True,
        lora_request: AdapterArgument = None,
        *,
        priority: int | Sequence[int] | None = None,
        scheduling_params: SchedulingArgument = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """Return one vector per prompt, made of its hidden states after the model's final norm;
        nothing is generated. `output.outputs.data` is a float32 tensor [hidden size].

        pooling_params: choice of the hidden states, and of scaling the vector to length 1; one for
        all, or one per prompt; None: choice of the model's files, or else the last token's, scaled.
        For prompts, adapters, errors and others see `generate`.
        """
        import torch

        check_foreign(RequestError, "encode", CALL_ARGUMENTS, others)
        call = self._vector_call(
            pooling_params, use_tqdm, lora_request, priority, scheduling_params
        )
        outputs = self._vectors.encode(prompts, call)
        for output in outputs:
            if output.outputs.data is not None:
                output.outputs.data = torch.from_numpy(output.outputs.data)
        return outputs

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingArgument = None,
        lora_request: AdapterArgument = None,
        prompt_name: str | None = None,
        priority: int | Sequence[int] | None = None,
        scheduling_params: SchedulingArgument = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return one vector per text, by the rules of the model's files; `output.outputs.embedding`
        is a list.

        prompt_name: one of the model's prompts, which stands before each text; None: its default
        one. For others see `encode`.
        """
        check_foreign(RequestError, "embed", CALL_ARGUMENTS, others)
        call = self._vector_call(
            pooling_params, use_tqdm, lora_request, priority, scheduling_params
        )
        return self._vectors.embed(prompts, prompt_name, call)

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingArgument = None,
        lora_request: AdapterArgument = None,
        priority: int | Sequence[int] | None = None,
        scheduling_params: SchedulingArgument = None,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Probability of each class of the model (`engine.spec.classes.labels`) for each text.
        Arguments and errors as in `encode`; RequestError for a model without classes."""
        check_foreign(RequestError, "classify", CALL_ARGUMENTS, others)
        call = self._vector_call(
            pooling_params, use_tqdm, lora_request, priority, scheduling_params
        )
        return self._vectors.classify(prompts, call)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingArgument = None,
        lora_request: AdapterArgument = None,
        priority: int | Sequence[int] | None = None,
        scheduling_params: SchedulingArgument = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one with each of several, or two lists of one length. A
        cross-encoder reads both texts at once; with other models the score is the cosine of two
        vectors. For arguments and errors see `encode`."""
        check_foreign(RequestError, "score", CALL_ARGUMENTS, others)
        call = self._vector_call(
            pooling_params, use_tqdm, lora_request, priority, scheduling_params
        )
        return self._vectors.score(data_1, data_2, call)

    def _vector_call(
        self,
        params: PoolingArgument,
        use_tqdm: bool,
        lora: AdapterArgument,
        priority: int | Sequence[int] | None,
        scheduling: SchedulingArgument,
    ) -> VectorCall:
        return VectorCall(
            params, lambda count: scheduling_for(count, scheduling, priority), lora, use_tqdm
        )


def _after(before: str, prompt: Prompt) -> Prompt:
    """The prompt, with a text before its own if it is one."""
    if isinstance(prompt, str):
        return before + prompt
    if before and isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": before + cast("str", prompt["prompt"])}
    return prompt


def _classifying(params: Sequence[PoolingParams]) -> list[PoolingParams]:
    """Parameters under which the model gives the numbers of its classes as they are."""
    return [replace(each, pooling="classify", normalize=False, dimensions=None) for each in params]


def _scored(output: PoolingRequestOutput, score: float | None) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        output.request_id,
        ScoringOutput(float("nan") if score is None else score),
        output.prompt_token_ids,
        output.finished,
        output.num_cached_tokens,
        output.error,
    )


def _pair_score(
    output: PoolingRequestOutput, classes: ClassesSpec, params: PoolingParams
) -> float | None:
    """Score of a cross-encoder; None of a pair that failed."""
    if output.error is not None:
        return None
    kind = classes.score_activation
    return float(class_probabilities(output.outputs.data, kind, params)[0])


def _cosine(one: PoolingRequestOutput, other: PoolingRequestOutput) -> float:
    """Return that of two vectors of length 1."""
    vectors = (each.outputs.data.astype(np.float64) for each in (one, other))
    return float(np.dot(*vectors))

"""Parameters of sampling. The names are those that vLLM and OpenAI users know."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from quire.base.errors import RequestError, quoted
from quire.base.foreign import explaining
from quire.protocol.grammar import StructuredOutputsParams
from quire.protocol.parameters.declaration import (
    MAX_INT,
    checked_integer,
    checked_items,
    checked_real,
    checked_text,
    checked_token_ids,
    declared,
    documented,
    parameter,
)
from quire.protocol.parameters.foreign import FOREIGN_PARAMS
from quire.protocol.parameters.repetition import RepetitionDetectionParams

__all__ = [
    "GREEDY_TEMPERATURE",
    "MAX_LOGPROBS",
    "MAX_SAMPLES",
    "SAMPLING_PARAMETERS",
    "LogitsProcessor",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "check_vocabulary",
    "sampling_for",
]

LogitsProcessor = Callable[[Sequence[int], Any], Any]
"""`(output_token_ids, logits [V]) -> logits [V]`, called before penalties; logits are a tensor."""

MAX_LOGPROBS = 1024
MAX_SAMPLES = 128
"""Most samples per prompt: the cap of the OpenAI API. A server may set a lower one."""

GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature means greedy: dividing by it leaves float32 no room (as in vLLM)."""

DEFAULT_MAX_TOKENS = 16


class RequestOutputKind(enum.IntEnum):
    """Contents of an output in a stream: all so far, the news since the one before, or, once and at
    the end, all."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@explaining(RequestError, "a sampling parameter", FOREIGN_PARAMS)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Rules for choosing the tokens of one request and for its end. Checked on construction.

    They do not change: `clone(temperature=0)` gives others, as `dataclasses.replace` does. Names
    that have no counterpart here are passed over where their value asks for nothing.

    Raises RequestError naming the parameter, its value and what it may be.
    """

    n: int = parameter(
        1,
        "samples per prompt; greedy ones come out equal",
        low=1,
        high=MAX_SAMPLES,
        advice="send several requests for more samples",
        others=("num_return_sequences",),
    )
    temperature: float = parameter(
        1.0,
        "0 takes the most likely token; higher is more varied",
        note="All below 1e-5 is greedy.",
        low=0.0,
        advice="0 is greedy",
        apis="all",
        has_flag=True,
        in_config="temperature",
        in_gguf="temp",
    )
    top_p: float = parameter(
        1.0,
        "sample from the most likely tokens that hold this much probability",
        note="0 is greedy.",
        low=0.0,
        high=1.0,
        advice="1 switches it off, 0 is greedy",
        apis="all",
        has_flag=True,
        is_filter=True,
        in_config="top_p",
        in_gguf="top_p",
    )
    top_k: int = parameter(
        0,
        "sample from so many of the most likely tokens",
        note="0 and -1 switch it off.",
        low=-1,
        high=MAX_INT,
        advice="0 or -1 switches it off",
        apis="all",
        has_flag=True,
        is_filter=True,
        in_config="top_k",
        in_gguf="top_k",
    )
    min_p: float = parameter(
        0.0,
        "leave out tokens below this share of the most likely one's probability",
        low=0.0,
        high=1.0,
        advice="0 switches it off",
        apis="all",
        has_flag=True,
        is_filter=True,
        in_config="min_p",
        in_gguf="min_p",
    )
    seed: int | None = parameter(
        None,
        "same seed, same tokens, in any batch",
        note="Any 64-bit integer, signed or not: x and x + 2**64 are one seed. -1 is none.",
        low=-(2**63),
        high=2**64 - 1,
        advice="any 64-bit integer, or leave it out for a random one",
        apis="all",
        in_receipt=False,
    )
    presence_penalty: float = parameter(
        0.0,
        "above 0: tokens of the answer become less likely",
        low=-2.0,
        high=2.0,
        advice="0 switches it off",
        apis="all",
        has_flag=True,
    )
    frequency_penalty: float = parameter(
        0.0,
        "above 0: the same, by how often they came",
        low=-2.0,
        high=2.0,
        advice="0 switches it off",
        apis="all",
        has_flag=True,
    )
    repetition_penalty: float = parameter(
        1.0,
        "above 1: earlier tokens become less likely",
        note="It counts prompt and output.",
        low=1e-6,  # the bounds keep logits finite
        high=1e6,
        advice="1 switches it off",
        apis="all",
        has_flag=True,
        in_config="repetition_penalty",
        in_gguf="penalty_repeat",
    )
    logit_bias: Mapping[int, float] | None = parameter(
        None,
        "numbers from -100 to 100 that are added to the logits of token ids",
        note="Ids may be decimal strings, as JSON writes them.",
    )
    allowed_token_ids: Sequence[int] | None = parameter(None, "token ids; all others are banned")
    bad_words: Sequence[str] | None = parameter(
        None,
        "words that must not come, at the start of a text or after a space, with this case",
        note="A longer word is banned only where the tokenizer writes it with one of their tokens.",
    )
    max_tokens: int | None = parameter(
        DEFAULT_MAX_TOKENS,
        "longest answer",
        note="None: up to the context length.",
        low=1,
        high=MAX_INT,
        advice="or null for as many as the context holds",
        has_flag=True,
        in_config="max_new_tokens",
        others=("n_predict", "num_predict", "max_new_tokens", "max_length"),
    )
    min_tokens: int = parameter(
        0,
        "no stop token before that many",
        low=0,
        high=MAX_INT,
        advice="0 switches it off",
        in_config="min_new_tokens",
    )
    stop: str | Sequence[str] | None = parameter(
        None,
        "end the answer before this",
        note="Matched on text; a special token means this token as well. Kept as a tuple.",
        has_flag=True,
        others=("stop_sequences", "stop_strings"),
    )
    stop_token_ids: Sequence[int] | None = parameter(None, "token ids that end the answer")
    include_stop_str_in_output: bool = parameter(False, "the text keeps the stop string")
    ignore_eos: bool = parameter(False, "the model's own end tokens do not end the answer")
    logprobs: int | None = parameter(
        None,
        "k most likely tokens beside the one that is there, with log-probabilities",
        note="0: only that one; -1: all.",
        low=-1,
        high=MAX_LOGPROBS,
        advice="-1 for the whole vocabulary, 0 for the chosen token alone",
        apis="python",
        in_receipt=False,
    )
    prompt_logprobs: int | None = parameter(
        None,
        "the same for the tokens of the prompt",
        low=-1,
        high=MAX_LOGPROBS,
        advice="-1 for the whole vocabulary, 0 for the token alone",
        in_receipt=False,
    )
    detokenize: bool = parameter(True, "False: `text` stays empty", apis="python", in_receipt=False)
    skip_special_tokens: bool = parameter(True, "the text leaves out special tokens")
    spaces_between_special_tokens: bool = parameter(
        True, "spaces stand between special tokens, where a tokenizer writes any"
    )
    logits_processors: Sequence[LogitsProcessor] | None = parameter(
        None,
        "functions `(output_token_ids, logits) -> logits`, called first",
        apis="python",
        in_receipt=False,
    )
    structured_outputs: StructuredOutputsParams | None = parameter(
        None,
        "language of the output",
        note="Where that ends so does the output, whatever min_tokens and ignore_eos say.",
        others=("grammar", "json_schema"),
        in_receipt=False,
    )
    repetition_detection: RepetitionDetectionParams | None = parameter(
        None, "end of an output that repeats itself", not_in_beams="compares whole sequences"
    )
    hooks: Sequence[str] = parameter(
        (),
        "names of output hooks that the engine offers, beside those that watch every output",
        in_receipt=False,
    )
    bad_words_token_ids: Sequence[Sequence[int]] | None = parameter(
        None,
        "token spellings of `bad_words`",
        note="Filled by rendering, or by a user without a tokenizer.",
        apis="python",
    )
    truncate_prompt_tokens: int | None = parameter(
        None,
        "of a longer prompt only the last so many tokens count",
        note="-1: all that leave room for max_tokens.",
        low=-1,
        high=MAX_INT,
        advice="-1 for as many as fit",
        in_receipt=False,
    )
    output_kind: RequestOutputKind = parameter(
        RequestOutputKind.CUMULATIVE,
        "contents of the outputs of a stream",
        apis="python",
        in_receipt=False,
    )
    xtc_probability: float = parameter(
        0.0,
        "chance by which a draw leaves out the most likely tokens (XTC)",
        note="Of those that hold `xtc_threshold` or more, only the least likely stays. It follows "
        "top_k, top_p and min_p. Greedy rows take the best token all the same.",
        low=0.0,
        high=1.0,
        advice="0 switches it off",
        apis="all",
        has_flag=True,
        is_filter=True,
        in_gguf="xtc_probability",
    )
    xtc_threshold: float = parameter(
        0.1,
        "least probability, at temperature 1, of the tokens that XTC may leave out",
        note="Above 0.5 none has it beside another one, so XTC is off.",
        low=0.0,
        high=1.0,
        advice="above 0.5 switches XTC off",
        apis="all",
        has_flag=True,
        in_gguf="xtc_threshold",
    )
    dry_multiplier: float = parameter(
        0.0,
        "penalty of a token that would go on with a repetition (DRY)",
        note="A token that followed the last L tokens before loses dry_multiplier · "
        "dry_base^(L - dry_allowed_length), if L is at least dry_allowed_length.",
        low=0.0,
        high=1e6,
        advice="0 switches it off",
        apis="all",
        has_flag=True,
    )
    dry_base: float = parameter(
        1.75,
        "growth of DRY's penalty with each token of the repetition",
        low=1.0,
        high=1e6,
        advice="1 for the same penalty at any length",
        apis="all",
        has_flag=True,
    )
    dry_allowed_length: int = parameter(
        2,
        "longest repetition without DRY's penalty for the next token",
        low=1,
        high=1024,
        advice="a number of tokens",
        apis="all",
        has_flag=True,
    )
    dry_penalty_last_n: int = parameter(
        -1,
        "last tokens of prompt and output in which DRY looks for repetitions",
        note="-1: all; 0 switches it off.",
        low=-1,
        high=MAX_INT,
        advice="-1 for all, 0 for none",
        apis="all",
        has_flag=True,
    )
    dry_sequence_breakers: Sequence[str] | None = parameter(
        ("\n", ":", '"', "*"),
        "texts at which DRY's repetitions end",
        note="Found where one token holds it, and where its own tokens stand.",
        most=16,
        most_chars=40,
        apis="all",
        has_flag=True,
    )
    dry_breaker_token_ids: Sequence[int | Sequence[int]] | None = parameter(
        None,
        "tokens, or several in a row, in place of `dry_sequence_breakers`",
        note="Filled by rendering, or by a user without a tokenizer.",
        apis="python",
    )

    deterministic: bool = parameter(
        False,
        "promise the bits of the answer, and give a receipt that `quire replay` checks",
        note="Refused by name where an engine can't promise them.",
        apis="all",
        in_receipt=False,
    )

    def __post_init__(self) -> None:
        for each in SAMPLING_PARAMETERS.values():
            value = getattr(self, each.name)
            if value is not each.default:
                self._set(each.name, each.checked(value))
        self._check_output_kind()
        self._check_lengths()
        self._check_texts()
        self._check_token_ids()
        self._check_processors()
        self._set("repetition_detection", RepetitionDetectionParams.of(self.repetition_detection))
        structured = cast("object", self.structured_outputs)
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs is {quoted(structured)}. Give StructuredOutputsParams(...)."
            )

    @classmethod
    def from_optional(
        cls, defaults: Mapping[str, object] | None = None, /, **given: object
    ) -> SamplingParams:
        """Parameters of a request in which None means "not given".

        defaults: the server's or the model's own (generation_config.json), used where nothing was
            given; what neither names has the default of this class. A default of max_tokens is
            raised to min_tokens, one of min_tokens lowered to a max_tokens that was given. One of
            stop does not count where no text is made.
        Raises RequestError on a name that is no parameter, and on a bad value.
        """
        chosen: dict[str, Any] = dict(defaults or {})
        chosen.update((name, value) for name, value in given.items() if value is not None)
        bound, least = chosen.get("max_tokens", DEFAULT_MAX_TOKENS), chosen.get("min_tokens")
        if isinstance(bound, int) and isinstance(least, int) and least > bound:
            if given.get("max_tokens") is None:
                chosen["max_tokens"] = least
            elif given.get("min_tokens") is None:
                chosen["min_tokens"] = max(bound, 0)
        if given.get("detokenize") is False and given.get("stop") is None:
            chosen.pop("stop", None)
        return cls(**chosen)

    def clone(self, **changes: Any) -> SamplingParams:
        """Equal parameters, but for `changes`. RequestError as on construction."""
        return replace(self, **changes)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken: no noise can change the choice."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it was normalised: never None, never a bare string."""
        return cast("tuple[str, ...]", self.stop)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_lengths(self) -> None:
        if self.seed == -1:
            self._set("seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is "
                f"{self.max_tokens}. Lower min_tokens or raise max_tokens."
            )
        if self.truncate_prompt_tokens == 0:
            name, advice = "truncate_prompt_tokens", "-1 for as many as fit"
            checked_integer(name, self.truncate_prompt_tokens, 1, MAX_INT, advice)

    def _check_output_kind(self) -> None:
        try:
            self._set("output_kind", RequestOutputKind(self.output_kind))
        except ValueError:
            names = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
            raise RequestError(
                f"output_kind is {quoted(self.output_kind)}. Give one of: {names}."
            ) from None

    def _check_texts(self) -> None:
        stop: object = self.stop
        texts = (stop,) if isinstance(stop, str) else checked_items("stop", stop, "strings")
        self._set("stop", tuple(checked_text("stop", text) for text in texts))
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop is {quoted(self.stop)} while detokenize is false, so there is no text to "
                "match it on. Set detokenize to true, or use stop_token_ids."
            )
        hooks = checked_items("hooks", self.hooks, "names of output hooks")
        self._set("hooks", tuple(checked_text("hooks", name) for name in hooks))
        words = checked_items("bad_words", self.bad_words, "strings")
        self._set("bad_words", tuple(checked_text("bad_words", word) for word in words))

    def _check_token_ids(self) -> None:
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("stop_token_ids", checked_token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = checked_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError(
                    "allowed_token_ids is empty, which bans every token. "
                    "Name at least one token id, or leave it out."
                )
            self._set("allowed_token_ids", allowed)
        if self.bad_words_token_ids is not None:
            name = "bad_words_token_ids"
            spellings = checked_items(name, self.bad_words_token_ids, "lists of token ids")
            words = tuple(checked_token_ids(name, word) for word in spellings)
            if () in words:
                raise RequestError(
                    f"bad_words_token_ids has an empty word in {quoted(spellings)}. "
                    "Give each word at least one token id."
                )
            self._set(name, words)
        if self.dry_breaker_token_ids is not None:
            breakers = _breakers(self.dry_breaker_token_ids)
            self._set("dry_breaker_token_ids", breakers)

    def _check_processors(self) -> None:
        processors = checked_items("logits_processors", self.logits_processors, "callables")
        for processor in processors:
            if not callable(processor):
                raise RequestError(
                    f"logits_processors has {quoted(processor)}, which cannot be called. "
                    "Give functions (output_token_ids, logits) -> logits."
                )
        self._set("logits_processors", tuple(processors))


SAMPLING_PARAMETERS = declared(SamplingParams)
"""Declarations of all fields of `SamplingParams`, by name."""

documented(SamplingParams)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what this vocabulary cannot serve.

    Raises RequestError if a token id is not in 0 … vocab_size - 1, or if `bad_words` has not been
    spelled in tokens.
    """
    words = params.bad_words_token_ids
    _check_range("logit_bias", params.logit_bias or (), vocab_size)
    _check_range("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_range("stop_token_ids", params.stop_token_ids or (), vocab_size)
    for word in words or ():
        _check_range("bad_words_token_ids", word, vocab_size)
    for each in params.dry_breaker_token_ids or ():
        _check_range(
            "dry_breaker_token_ids", (each,) if isinstance(each, int) else each, vocab_size
        )
    if params.bad_words and words is None:
        raise RequestError(
            f"bad_words is {quoted(params.bad_words)}, but there is no tokenizer to spell them. "
            "Give bad_words_token_ids instead, or load a tokenizer."
        )


def sampling_for(
    count: int, given: SamplingParams | Sequence[SamplingParams]
) -> Sequence[SamplingParams]:
    """Return the parameters of each of `count` prompts.
    Raises RequestError if `given` are other objects, or of another number."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if isinstance(given, Mapping):
        raise RequestError(f"sampling_params is {given!r}: give SamplingParams(**that)")
    many: list[object] = list(given) if isinstance(cast("object", given), Iterable) else [given]
    for params in many:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params has a {type(params).__name__}: give SamplingParams objects"
            )
    if len(many) != count:
        raise RequestError(
            f"there are {count} prompts but {len(many)} sampling_params: "
            "give one for all, or one per prompt"
        )
    return cast("list[SamplingParams]", many)


def _check_range(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} names token id {token_id}, but this model's vocabulary has "
                f"{vocab_size} tokens. Use ids from 0 to {vocab_size - 1}."
            )


def _breakers(value: object) -> tuple[int | tuple[int, ...], ...]:
    """Single tokens, of which there may be as many as the vocabulary has, before sequences."""
    name = "dry_breaker_token_ids"
    tokens: list[int] = []
    sequences: list[tuple[int, ...]] = []
    for each in checked_items(name, value, "token ids or lists of them"):
        if type(each) is int and 0 <= each <= MAX_INT:
            tokens.append(each)
        elif isinstance(each, Iterable):
            sequences.append(checked_token_ids(name, cast("object", each)))
        else:
            tokens.append(checked_integer(f"an entry of {name}", each, 0, MAX_INT, "a token id"))
    if () in sequences:
        raise RequestError(f"{name} has an empty list. Remove that entry.")
    return (*tokens, *sequences)


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(
            f"logit_bias is {quoted(value)}, which is no mapping. "
            "Give an object from token ids to numbers."
        )
    biases: dict[int, float] = {}
    for key, bias in cast("Mapping[object, object]", value).items():
        token_id = checked_integer("a key of logit_bias", _numeral(key), 0, MAX_INT, "a token id")
        if token_id in biases:
            raise RequestError(f"logit_bias names token id {token_id} twice. Name it once.")
        advice = "allowed_token_ids and bad_words ban for certain"
        biases[token_id] = checked_real(f"logit_bias[{token_id}]", bias, -100.0, 100.0, advice)
    return biases


def _numeral(key: object) -> object:
    """JSON has only text keys: "50256" means 50256. Anything else is returned for refusal."""
    is_numeral = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
    return int(cast("str", key)) if is_numeral else key

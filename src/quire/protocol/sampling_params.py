"""Parameters of sampling. The names are those that vLLM and OpenAI users know."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from quire.errors import RequestError, quoted
from quire.foreign import ForeignName, explaining
from quire.protocol.codec import is_unicode
from quire.protocol.grammar import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "GREEDY_TEMPERATURE",
    "MAX_LOGPROBS",
    "MAX_SAMPLES",
    "NUMBER_BOUNDS",
    "LogitsProcessor",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "TokensLeft",
    "ban_names",
    "check_bans",
    "check_vocabulary",
    "listed",
    "sampling_for",
    "tokens_left",
]

LogitsProcessor = Callable[[Sequence[int], Any], Any]
"""`(output_token_ids, logits [V]) -> logits [V]`, called before penalties; logits are a tensor."""

MAX_LOGPROBS = 1024
MAX_SAMPLES = 128
"""Most samples per prompt: the cap of the OpenAI API. A server may set a lower one."""

GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature means greedy: dividing by it leaves float32 no room (as in vLLM)."""

DEFAULT_MAX_TOKENS = 16

MAX_PATTERN_SIZE = 1024
"""Tokens of the longest pattern that `RepetitionDetectionParams` looks for in each step."""

_MAX_INT = 2**31 - 1


class RequestOutputKind(enum.IntEnum):
    """Contents of an output in a stream: all so far, the news since the one before, or, once and at
    the end, all."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """End of an output that has fallen into a loop; the names and meanings are those of vLLM.

    max_pattern_size: tokens of the longest pattern that counts, at most 1,024; 0 switches it off.
    min_pattern_size: tokens of the shortest one; 0 is 1. min_count: times that it stands at the end
    of the output, one after the other, at least 2.

    Raises RequestError naming the field, its value and what it may be.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        name = "repetition_detection"
        for field, low, high, advice in (
            ("max_pattern_size", 0, MAX_PATTERN_SIZE, "0 switches it off"),
            ("min_pattern_size", 0, MAX_PATTERN_SIZE, "0 is 1"),
            ("min_count", 2 if self.max_pattern_size else 0, _MAX_INT, "from 2 on it repeats"),
        ):
            value = _integer(f"{name}.{field}", getattr(self, field), low, high, advice)
            object.__setattr__(self, field, value)
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                f"{name}.min_pattern_size is {self.min_pattern_size}, more than max_pattern_size, "
                f"which is {self.max_pattern_size}. Lower it or raise max_pattern_size."
            )

    @classmethod
    def of(cls, given: object) -> RepetitionDetectionParams | None:
        """Return parameters from themselves, None, or an object of JSON with their fields."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise RequestError(
                f"repetition_detection is {quoted(given)}. Give RepetitionDetectionParams(...)."
            )
        values = cast("Mapping[str, Any]", given)
        unknown = sorted(set(values) - set(cls.__slots__))
        if unknown:
            raise RequestError(
                f"repetition_detection.{unknown[0]} is no field. Use some of: "
                f"{', '.join(cls.__slots__)}."
            )
        return cls(**values)

    def ends(self, output_ids: npt.NDArray[np.int32]) -> bool:
        """Return True if an output ends with a pattern that is there often enough."""
        if not self.max_pattern_size:
            return False
        longest = min(self.max_pattern_size, len(output_ids) // self.min_count)
        if longest < max(self.min_pattern_size, 1):
            return False
        before = output_ids[-longest - 1 : -1]
        sizes: list[int] = ((before[::-1] == output_ids[-1]).nonzero()[0] + 1).tolist()
        return any(self._repeats(output_ids, size) for size in sizes)

    def _repeats(self, output_ids: npt.NDArray[np.int32], size: int) -> bool:
        if size < self.min_pattern_size:
            return False
        for count in (
            2,
            self.min_count,
        ):  # most often two are not equal, so that a step pays little
            span = output_ids[len(output_ids) - size * count :]
            if not (span[size:] == span[:-size]).all():
                return False
        return True


_OF_BEAMS = "LLM.beam_search with BeamSearchParams does it"

FOREIGN_PARAMS: Mapping[str, ForeignName] = {
    "guided_decoding": ForeignName("structured_outputs=StructuredOutputsParams(…) does it"),
    "best_of": ForeignName("ask for n samples, and take the best by cumulative_logprob", ("1",)),
    "use_beam_search": ForeignName(_OF_BEAMS),
    "length_penalty": ForeignName(_OF_BEAMS, ("1", "1.0")),
    "early_stopping": ForeignName(_OF_BEAMS),
    "extra_args": ForeignName("nothing reads further arguments; logits_processors are functions"),
    "flat_logprobs": ForeignName("log-probabilities are one dict for each token"),
    "logits_processors_kwargs": ForeignName("a function can be given its arguments before"),
    "skip_clone": ForeignName("parameters are never copied", None),
    "skip_reading_prefix_cache": ForeignName("a cache_salt of the prompt's own does the same"),
    "thinking_token_budget": ForeignName("answers are not parsed for reasoning yet"),
    "output_text_buffer_length": ForeignName("it follows from stop", None),
    "stop_reason": ForeignName("outputs tell it"),
}
"""Parameters of vLLM's that have no counterpart."""


@explaining(RequestError, "a sampling parameter", FOREIGN_PARAMS)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Rules for choosing the tokens of one request and for its end. Checked on construction.

    n: samples per prompt, 1 … 128; greedy ones come out equal. temperature: 0 and all below 1e-5
    are greedy. top_p in [0, 1], where 0 is greedy too; top_k 0 or -1 is off; min_p in [0, 1],
    relative to the most likely token. seed: same seed, same tokens, in any batch; any 64-bit
    integer, signed or not (x and x + 2**64 are one seed), but -1 is "no seed", as in vLLM. presence
    and frequency penalties in [-2, 2], over the output; repetition_penalty in [1e-6, 1e6], over
    prompt and output.
    max_tokens None: up to the context length. min_tokens: no stop token before that many.
    logprobs, prompt_logprobs: k most likely tokens beside the one that is there (0: only that one,
    -1: all). stop: strings, matched on text; one that is a special token means this token as well;
    kept as a tuple. logit_bias: in [-100, 100], added to the logit of a token id; ids may be
    decimal strings, as JSON writes them. allowed_token_ids: all others are banned. bad_words:
    banned as they start a text and as they follow a space, with this case; a longer word is banned
    only where the tokenizer writes it with the tokens of one of them. detokenize False: `text`
    stays empty. truncate_prompt_tokens: of a longer prompt only the last so many tokens count; -1:
    as many as leave room for max_tokens. output_kind: of the outputs of a stream.
    structured_outputs: to which language the output belongs; where that ends so does the output,
    whatever min_tokens and ignore_eos say. hooks: names of output hooks that the engine offers, to
    watch the output beside those that watch every one. repetition_detection: end of an output that
    repeats itself.

    They do not change: `clone(temperature=0)` gives others, as `dataclasses.replace` does. Names
    that have no counterpart here are passed over where their value asks for nothing.

    Raises RequestError naming the parameter, its value and what it may be.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: Sequence[LogitsProcessor] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    hooks: Sequence[str] = ()
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Token spellings of `bad_words`; filled by rendering, or by a user without a tokenizer."""
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name, low, high, advice in _INTEGERS:
            self._set(name, _integer(name, getattr(self, name), low, high, advice))
        for name, low, high, low_is_in, advice in _REALS:
            self._set(name, _real(name, getattr(self, name), low, high, low_is_in, advice))
        for name in _FLAGS:
            _flag(name, getattr(self, name))
        self._check_output_kind()
        self._check_optional_integers()
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

    def _check_optional_integers(self) -> None:
        if self.seed is not None:
            advice = "any 64-bit integer, or leave it out for a random one"
            seed = _integer("seed", self.seed, -(2**63), 2**64 - 1, advice)
            self._set("seed", None if seed == -1 else seed)
        if self.max_tokens is not None:
            advice = "or null for as many as the context holds"
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, _MAX_INT, advice))
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}, more than max_tokens, which is "
                    f"{self.max_tokens}. Lower min_tokens or raise max_tokens."
                )
        if self.truncate_prompt_tokens is not None:
            name, advice = "truncate_prompt_tokens", "-1 for as many as fit"
            length = _integer(name, self.truncate_prompt_tokens, -1, _MAX_INT, advice)
            self._set(name, length or _integer(name, length, 1, _MAX_INT, advice))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                advice = "-1 for the whole vocabulary, 0 for the chosen token alone"
                self._set(name, _integer(name, value, -1, MAX_LOGPROBS, advice))

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
        texts = (stop,) if isinstance(stop, str) else _sequence("stop", stop, "strings")
        self._set("stop", tuple(_text("stop", text) for text in texts))
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop is {quoted(self.stop)} while detokenize is false, so there is no text to "
                "match it on. Set detokenize to true, or use stop_token_ids."
            )
        hooks = _sequence("hooks", self.hooks, "names of output hooks")
        self._set("hooks", tuple(_text("hooks", name) for name in hooks))
        words = _sequence("bad_words", self.bad_words, "strings")
        self._set("bad_words", tuple(_text("bad_words", word) for word in words))

    def _check_token_ids(self) -> None:
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError(
                    "allowed_token_ids is empty, which bans every token. "
                    "Name at least one token id, or leave it out."
                )
            self._set("allowed_token_ids", allowed)
        if self.bad_words_token_ids is not None:
            name = "bad_words_token_ids"
            spellings = _sequence(name, self.bad_words_token_ids, "lists of token ids")
            words = tuple(_token_ids(name, word) for word in spellings)
            if () in words:
                raise RequestError(
                    f"bad_words_token_ids has an empty word in {quoted(spellings)}. "
                    "Give each word at least one token id."
                )
            self._set(name, words)

    def _check_processors(self) -> None:
        processors = _sequence("logits_processors", self.logits_processors, "callables")
        for processor in processors:
            if not callable(processor):
                raise RequestError(
                    f"logits_processors has {quoted(processor)}, which cannot be called. "
                    "Give functions (output_token_ids, logits) -> logits."
                )
        self._set("logits_processors", tuple(processors))


_INTEGERS: tuple[tuple[str, int, int, str], ...] = (
    ("n", 1, MAX_SAMPLES, "send several requests for more samples"),
    ("top_k", -1, _MAX_INT, "0 or -1 switches it off"),
    ("min_tokens", 0, _MAX_INT, "0 switches it off"),
)
"""name, lowest, highest, advice."""

_REALS: tuple[tuple[str, float, float, bool, str], ...] = (
    ("temperature", 0.0, math.inf, True, "0 is greedy"),
    ("top_p", 0.0, 1.0, True, "1 switches it off, 0 is greedy"),
    ("min_p", 0.0, 1.0, True, "0 switches it off"),
    ("presence_penalty", -2.0, 2.0, True, "0 switches it off"),
    ("frequency_penalty", -2.0, 2.0, True, "0 switches it off"),
    ("repetition_penalty", 1e-6, 1e6, True, "1 switches it off"),  # keeps logits finite
)
"""name, lowest, highest, whether the lowest itself is allowed, advice."""

NUMBER_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        name: (low, math.inf if high == _MAX_INT else high)
        for name, low, high, *_ in (*_INTEGERS, *_REALS)
    }
)
"""Lowest and highest value of each parameter that is a number; infinity where only memory bounds
it."""

_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


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
    if params.bad_words and words is None:
        raise RequestError(
            f"bad_words is {quoted(params.bad_words)}, but there is no tokenizer to spell them. "
            "Give bad_words_token_ids instead, or load a tokenizer."
        )


class TokensLeft(NamedTuple):
    """Numbers of tokens that a request does not ban wherever they stand. ending: those that stop
    a sequence, once it has min_tokens tokens. going_on: all others."""

    going_on: int
    ending: int


def tokens_left(
    params: SamplingParams, stop_token_ids: Collection[int], vocab_size: int
) -> TokensLeft:
    """Return the tokens of a vocabulary that `params`, checked by `check_vocabulary`, leave.
    stop_token_ids: all that end the sequence."""
    banned = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    stops = {token_id for token_id in stop_token_ids if token_id < vocab_size} - banned
    if params.allowed_token_ids is None:
        return TokensLeft(vocab_size - len(banned) - len(stops), len(stops))
    allowed = set(params.allowed_token_ids) - banned
    return TokensLeft(len(allowed - stops), len(allowed & stops))


def check_bans(params: SamplingParams, stop_token_ids: Collection[int], vocab_size: int) -> None:
    """Refuse parameters that together ban every token from the start; arguments as in
    `tokens_left`. Raises RequestError naming them."""
    names = ban_names(params)
    if not names:
        return
    left = tokens_left(params, stop_token_ids, vocab_size)
    if left.going_on or (left.ending and not params.min_tokens):
        return
    stops = (
        "" if not left.ending else f" (min_tokens {params.min_tokens} bans stop tokens at first)"
    )
    raise RequestError(
        f"{listed(names)} leave no token that the answer could begin with{stops}. Relax "
        f"{'one of them' if len(names) > 1 else 'it'}."
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


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def ban_names(params: SamplingParams) -> list[str]:
    """Return the fields by which a request may ban tokens, of the fields that it has set."""
    words = "bad_words" if params.bad_words else "bad_words_token_ids"
    is_set = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        words: bool(params.bad_words_token_ids),
        "min_tokens": params.min_tokens > 0,
        "stop_token_ids": params.min_tokens > 0 and bool(params.stop_token_ids),
    }
    return [name for name, value in is_set.items() if value]


def _check_range(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} names token id {token_id}, but this model's vocabulary has "
                f"{vocab_size} tokens. Use ids from 0 to {vocab_size - 1}."
            )


def _integer(name: str, value: object, low: int, high: int, advice: str) -> int:
    """`value` as an int within [low, high]. A bool is not a number here, nor is 2.0 an integer."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(cast("Any", value))
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise RequestError(
            f"{name} is {quoted(value)}, but it must be an integer from {low} to {high}. "
            f"Change it ({advice})."
        )
    return number


def _real(name: str, value: object, low: float, high: float, low_is_in: bool, advice: str) -> float:
    """`value` as a finite float within the range; a bool or a text is not a number here."""
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        number = float(cast("Any", value))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    above = number >= low if low_is_in else number > low
    if not (above and number <= high and math.isfinite(number)):
        bound = f"{'at least' if low_is_in else 'greater than'} {low:g}"
        if high < math.inf:
            bound += f" and at most {high:g}"
        raise RequestError(
            f"{name} is {quoted(value)}, but it must be a finite number {bound}. "
            f"Change it ({advice})."
        )
    return number


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {quoted(value)}, but it is a switch. Use true or false.")


def _sequence(name: str, value: object, of_what: str) -> tuple[object, ...]:
    """`value` as a tuple; None is empty. Texts and mappings are not lists of things."""
    if value is None:
        return ()
    if not _is_list(value):
        raise RequestError(
            f"{name} is {quoted(value)}, which is no list. Give a list of {of_what}."
        )
    return tuple(cast("Iterable[object]", value))


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{name} has {quoted(value)}, but it takes texts of at least one character. "
            "Remove that entry."
        )
    if not is_unicode(value):
        raise RequestError(
            f"{name} has {quoted(value)}, which has half of a surrogate pair, so no text has it. "
            "Remove that entry."
        )
    return value


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    items = _sequence(name, value, "token ids")
    return tuple(_integer(f"an entry of {name}", i, 0, _MAX_INT, "a token id") for i in items)


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
        token_id = _integer("a key of logit_bias", _numeral(key), 0, _MAX_INT, "a token id")
        if token_id in biases:
            raise RequestError(f"logit_bias names token id {token_id} twice. Name it once.")
        advice = "allowed_token_ids and bad_words ban for certain"
        biases[token_id] = _real(f"logit_bias[{token_id}]", bias, -100.0, 100.0, True, advice)
    return biases


def _numeral(key: object) -> object:
    """JSON has only text keys: "50256" means 50256. Anything else is returned for refusal."""
    is_numeral = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
    return int(cast("str", key)) if is_numeral else key

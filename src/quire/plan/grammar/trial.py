"""Reads and tries grammars in a process that may die of them, before the engine compiles them.

The engine's own process would hold Python's lock while it reads a schema, and its steps would wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from typing import IO

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.base.errors import EngineError, RequestError
from quire.plan.grammar.source import (
    grammar_text,
    lenient_schemas,
    refusal,
    refuse_null,
    without_refused,
)
from quire.plan.grammar.vocabulary import Vocabulary, spelled_by_bytes
from quire.protocol.grammar import GrammarSpec
from quire.protocol.json_schema import without_unsupported

__all__ = ["LIMITS", "GrammarTrial", "Verdict", "serve_trials"]

LIMITS = LLParserLimits(verbose_errors=False)
"""Errors that quoted schemas would leak them into logs."""

CPU_SECONDS = 2
"""Processor time of one trial. The largest real schemas known take 0.8 s."""
WALL_SECONDS = 30.0
"""The child has the lowest priority, so on a busy machine its seconds are long."""
START_SECONDS = 120.0
MEMORY_BYTES = 2**30
MASK_SECONDS = 0.1
"""Processor time for one mask after the first, which fills caches: a step would wait for it."""
NUM_STEPS = 8
"""Masks that a trial makes: the cost of a grammar shows at the first ones only."""

END_SECONDS = 10.0
"""Seconds for the end of a child whose pipe has closed."""
GRAMMAR_DEATHS = frozenset({-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV})
"""Statuses of a child that a grammar kills with its processor time, its memory or its stack. Any
other death, SIGKILL of a machine without memory among them, says nothing of the grammar."""

TOO_MUCH = (
    f"the grammar takes more than {CPU_SECONDS} s or {MEMORY_BYTES >> 20} MiB to compile. Make it "
    "simpler: fewer alternatives, smaller repetitions and numbers."
)

_LENGTH = struct.Struct("<I")

_CHILD = f"import os; os.nice(10); from {__name__} import serve_trials; serve_trials()"
"""Its imports have a lower priority too: a tenth of a processor beside a busy engine, where the
lowest one has a seventieth and a start takes minutes. It is in the session of its parent: Linux
gives each session an equal share of the processors (autogroup, sched(7)), and counts priorities
within it."""


_UNASKED = "no tokenizer"
"""Beginning of the library's warnings about tokens in a grammar: it has no tokenizer there."""


class Verdict(msgspec.Struct, frozen=True):
    """text: grammar for the library. refusal: reason why there is none, for the client.

    dropped: keywords that are not enforced, by the digest of each schema that is not strict.
    ignored: the same for the whole grammar, in the words of the library.
    """

    text: str = ""
    refusal: str = ""
    dropped: dict[str, list[str]] = {}
    ignored: list[str] = []


class GrammarTrial:
    """One child, started when it is first needed and again after each grammar that it died of. It
    ends with this, also if nobody closes it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], GrammarTrial] | None = None

    def check(self, spec: GrammarSpec) -> Verdict:
        """Read a grammar and try it; one that takes too much time or memory is refused.

        A trial that came to no end raises, which says nothing lasting of the grammar: RequestError
        if there was no time, EngineError if the child went for another reason.
        """
        refuse_null(spec)  # no such text can be sent
        child = self._running()
        try:
            _write(child.stdin, msgspec.msgpack.encode(spec))
            return msgspec.msgpack.decode(_read_within(child.stdout, WALL_SECONDS), type=Verdict)
        except TimeoutError as error:
            self.close()
            raise RequestError(
                f"the grammar takes more than {WALL_SECONDS:.0f} s to compile on this machine, "
                "which may be busy. Make it simpler, or send the request again later."
            ) from error
        except (OSError, EOFError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
            self.close()
            if child.returncode in GRAMMAR_DEATHS:
                return Verdict(refusal=TOO_MUCH)
            raise EngineError(
                f"the process that tried the grammar ended with status {child.returncode}, which "
                "is no fault of the grammar: send the request again"
            ) from error

    def _running(self) -> subprocess.Popen[bytes]:
        """The child. EngineError if it cannot be started."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        try:
            return self._start()
        except (OSError, EOFError) as error:
            self.close()
            raise EngineError(
                f"the process that tries grammars does not start ({error!r}): send the request "
                "again"
            ) from error

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, sys.path))
        self._child = child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is not for it
            env={**os.environ, "PYTHONPATH": path},
        )
        self._end = weakref.finalize(self, _end, child)
        self._end.atexit = False  # the child sees its pipe close
        vocabulary = self._vocabulary
        given = (list(vocabulary.tokens), list(vocabulary.special_ids), vocabulary.eos_id)
        _write(child.stdin, msgspec.msgpack.encode(given))
        _read_within(child.stdout, START_SECONDS)
        return child

    def close(self) -> None:
        """End the child. May be called twice."""
        end, self._end, self._child = self._end, None, None
        if end is not None:
            end()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    child.wait()


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> bytes:
    """EOFError at the end."""
    assert pipe is not None
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data


def _read_within(pipe: IO[bytes] | None, seconds: float) -> bytes:
    """TimeoutError if nothing has come by then."""
    assert pipe is not None
    ready, _, _ = select.select([pipe], [], [], seconds)
    if not ready:
        raise TimeoutError
    return _read(pipe)


def _judge(tokenizer: LLTokenizer, num_words: int, spec: GrammarSpec) -> Verdict:
    text = whole = ""
    try:
        text = whole = grammar_text(spec)
        fault = _try(tokenizer, num_words, text)
        if fault:
            text = grammar_text(spec, drops_refused=True)
            fault = fault if text == whole else _try(tokenizer, num_words, text)
    except RequestError as error:
        return Verdict(refusal=str(error))
    except BaseException as error:  # noqa: BLE001  a panic of the library is a verdict too
        fault = f"{error}" or type(error).__name__
    if fault:
        return Verdict(refusal=_refusal(spec, fault))
    schemas = list(lenient_schemas(spec))
    if not schemas:
        return Verdict(text)
    try:
        return _with_warnings(text, schemas, drops_refused=text != whole)
    except BaseException:  # noqa: BLE001  a grammar serves without its warnings
        return Verdict(text)


def _refusal(spec: GrammarSpec, fault: str) -> str:
    try:
        return refusal(spec, fault)
    except BaseException:  # noqa: BLE001  a panic of the library, which was asked once more
        return f"the grammar cannot be used: {fault[:200]}"


def _with_warnings(text: str, schemas: list[str], *, drops_refused: bool) -> Verdict:
    """Return a verdict of a good grammar. schemas: schemas that are not strict. drops_refused: see
    `grammar_text`."""
    is_error, words = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    ignored = [] if is_error else [word for word in words if not word.startswith(_UNASKED)]
    dropped: dict[str, list[str]] = {}
    for text_of_schema in schemas:
        schema = json.loads(text_of_schema)
        paths = without_unsupported(schema)
        paths += without_refused(schema) if drops_refused else []
        dropped[_digest(text_of_schema)] = paths
    return Verdict(text, dropped=dropped, ignored=ignored)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _try(tokenizer: LLTokenizer, num_words: int, grammar: str) -> str:
    """Return the fault of a grammar, "" for none. The grammar is compiled, and followed for some
    tokens, a different way at each step."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    mask = np.zeros(num_words, np.uint32)
    for step in range(NUM_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        started = time.process_time()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        seconds = time.process_time() - started
        if step and seconds > MASK_SECONDS:
            return f"it takes {seconds:.1f} s for one token; make it simpler"
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != tokenizer.eos_token]
        if not len(allowed):
            break
        matcher.consume_token(int(allowed[step * 7919 % len(allowed)]))
    return matcher.get_error() if matcher.is_error() else ""


def _bound_cpu() -> None:
    """The kernel ends this process when it has worked for so long from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def serve_trials() -> None:
    """The child: a vocabulary comes first, then grammars, until the pipe closes."""
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        _serve()


def _serve() -> None:
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints must not go between the answers
    tokens, special_ids, eos_id = msgspec.msgpack.decode(
        _read(source), type=tuple[list[bytes], list[int], int]
    )
    vocabulary = Vocabulary(tokens, special_ids, eos_id)
    tokenizer = vocabulary.tokenizer(spelled_by_bytes(vocabulary))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _memory() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    _write(target, b"ready")
    num_words = -(-len(tokens) // 32)
    while True:
        spec = msgspec.msgpack.decode(_read(source), type=GrammarSpec)
        _bound_cpu()
        _write(target, msgspec.msgpack.encode(_judge(tokenizer, num_words, spec)))


def _memory() -> int:
    """Bytes of data that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()

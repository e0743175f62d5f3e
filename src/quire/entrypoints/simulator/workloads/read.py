"""Traces from files: our own JSONL, and public ones (BurstGPT, Azure, Mooncake).

Our own has one object per line: `arrival_s`, `prompt_tokens`, `output_tokens`; if prompts begin
alike, `prefix_id` with `prefix_tokens`; for several answers to one prompt, `n`. `quire serve
--record-trace` writes it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.entrypoints.simulator.workloads.trace import Piece, TraceRequest
from quire.protocol.sampling_params import MAX_SAMPLES

__all__ = ["MAX_TOKENS", "read_trace"]

MAX_TOKENS = 10_000_000
"""Tokens of the longest prompt or output that is believed."""

MOONCAKE_BLOCK = 512
"""Tokens that one of `hash_ids` stands for."""

_BURST_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

Row = Mapping[str, Any]


class _LineError(Exception):
    """A sentence on a line of a file; line None: the one that was read last."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace, in order of arrival, with its first request at second 0.

    The format is known by the first line: an object of JSON (ours, or Mooncake's with `timestamp`
    in milliseconds, `input_length`, `output_length` and `hash_ids`), or the columns of a CSV file
    (BurstGPT's `Timestamp`, `Request tokens`, `Response tokens`; Azure's `TIMESTAMP`,
    `ContextTokens`, `GeneratedTokens`). Failed requests of BurstGPT, with no response tokens, are
    left out. Raises ConfigError naming the file and the line of whatever cannot be.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Trace {path} cannot be read ({error}). Give another file.") from error
    first = next((line for line in lines if line.strip()), "")
    rows = _json_rows(lines) if first.lstrip().startswith("{") else _csv_rows(lines)
    found: list[TraceRequest] = []
    last = 1
    try:
        for number, convert, row in rows:
            last = number
            request = convert(row)
            if request is not None:
                found.append(request)
    except _LineError as fault:
        raise ConfigError(f"{path}, line {fault.line or last}: {fault}") from fault
    if not found:
        raise ConfigError(f"Trace {path} has no requests. Give another file.")
    return _from_zero(found)


def _from_zero(found: Sequence[TraceRequest]) -> list[TraceRequest]:
    ordered = sorted(found, key=lambda request: request.arrival_s)
    first = ordered[0].arrival_s
    return [replace(each, arrival_s=each.arrival_s - first) for each in ordered]


Convert = Callable[[Row], TraceRequest | None]


def _json_rows(lines: Sequence[str]) -> Iterator[tuple[int, Convert, Row]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise _LineError(f"{line.strip()[:60]!r} is no JSON ({error})", number) from error
        if not isinstance(row, dict):
            raise _LineError(f"{line.strip()[:60]!r} is no object", number)
        yield number, _of_mooncake if "input_length" in row else _of_ours, row


def _csv_rows(lines: Sequence[str]) -> Iterator[tuple[int, Convert, Row]]:
    reader = csv.DictReader(lines)
    names = reader.fieldnames or ()
    known = ((_BURST_COLUMNS, _of_burst), (_AZURE_COLUMNS, _of_azure))
    convert = next((found for columns, found in known if set(columns) <= set(names)), None)
    if convert is None:
        raise _LineError(
            f"columns {', '.join(names) or '(none)'} are those of no trace that is known: give "
            f"JSONL with arrival_s, prompt_tokens and output_tokens, or a CSV file with "
            f"{', '.join(_BURST_COLUMNS)} or with {', '.join(_AZURE_COLUMNS)}",
            1,
        )
    for row in reader:
        yield reader.line_num, convert, row


def _of_ours(row: Row) -> TraceRequest:
    prompt = _tokens(row, "prompt_tokens")
    pieces: tuple[Piece, ...] = ()
    if "prefix_id" in row:
        length = _tokens(row, "prefix_tokens")
        if length > prompt:
            raise _LineError(f"prefix_tokens is {length}, more than the {prompt} of the prompt")
        pieces = (Piece(_prefix_number(row["prefix_id"]), length),)
    n = _tokens(row, "n") if "n" in row else 1
    if n > MAX_SAMPLES:
        raise _LineError(f"n is {n}: give at most {MAX_SAMPLES}")
    output = _tokens(row, "output_tokens")
    return TraceRequest(_seconds(row, "arrival_s"), prompt, output, pieces, n)


def _prefix_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise _LineError(f"prefix_id is {value!r}: give a whole number from 0 to {2**31 - 1}")
    return value


def _of_mooncake(row: Row) -> TraceRequest:
    prompt = _tokens(row, "input_length")
    names = row.get("hash_ids", [])
    if not isinstance(names, list):
        raise _LineError(f"hash_ids is {str(names)[:60]!r}: give a list of whole numbers")
    pieces = tuple(Piece(_prefix_number(name), MOONCAKE_BLOCK) for name in names)
    at_s = _seconds(row, "timestamp") / 1000
    return TraceRequest(at_s, prompt, _tokens(row, "output_length"), pieces)


def _of_burst(row: Row) -> TraceRequest | None:
    if str(row["Response tokens"]).strip() == "0":
        return None
    at_s, prompt, output = _BURST_COLUMNS
    return TraceRequest(_seconds(row, at_s), _tokens(row, prompt), _tokens(row, output))


def _of_azure(row: Row) -> TraceRequest:
    at, prompt, output = _AZURE_COLUMNS
    text = str(row[at]).strip()
    try:
        moment = datetime.fromisoformat(_with_microseconds(text))
    except ValueError as error:
        raise _LineError(f"{at} is {text[:60]!r}: give a date and a time") from error
    seconds = (moment.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()  # noqa: DTZ001
    return TraceRequest(seconds, _tokens(row, prompt), _tokens(row, output))


def _with_microseconds(text: str) -> str:
    """Azure's times have seven digits after the second, which `datetime` does not read."""
    whole, dot, fraction = text.partition(".")
    digits = "".join(c for c in fraction if c.isdigit())
    return f"{whole}.{digits[:6]:0<6}" if dot else whole


def _seconds(row: Row, name: str) -> float:
    value = _number(row, name)
    if value < 0:
        raise _LineError(f"{name} is {value:g}: time does not run before 0")
    return value


def _tokens(row: Row, name: str) -> int:
    value = _number(row, name)
    if value != int(value) or not 1 <= value <= MAX_TOKENS:
        raise _LineError(f"{name} is {row[name]!r}: give a whole number from 1 to {MAX_TOKENS:,}")
    return int(value)


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    if value is None or value == "":
        raise _LineError(f"{name} is missing")
    try:
        found = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        found = math.nan
    if isinstance(value, bool) or not math.isfinite(found):
        raise _LineError(f"{name} is {str(value)[:60]!r}: give a number")
    return found

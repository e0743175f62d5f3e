"""Why a request was slow, and why its prompt was computed again, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from quire.protocol.status import (
    LoadOutcome,
    OtherRequest,
    Preemption,
    PreemptionCause,
    RequestFacts,
    WaitReason,
)
from quire.server.readings.chat_parts import Place
from quire.server.readings.prompt_memory import CacheVerdict, MissKind
from quire.server.readings.timeline import Timeline

__all__ = ["OTHER_KEY", "cache_sentences", "seen_by", "slow_sentences"]

OTHER_KEY = ""
"""Stands for the id of a request of another key."""

SHORTEST_S = 0.001
"""Waits and pauses below this are not told."""

PAUSE_RATIO = 5.0
"""A pause between two tokens is told if it is so many times as long as the usual one."""

_WAITS = {
    WaitReason.PLACES: "for a place in the batch (max_num_seqs)",
    WaitReason.TOKENS: "for its turn in a step (max_num_batched_tokens)",
    WaitReason.BLOCKS: "for free K/V blocks",
    WaitReason.SPARE: "for others, since it runs on spare capacity",
    WaitReason.HELD: "while the engine admitted nobody",
    WaitReason.PENDING: "behind a request whose tokens were on their way",
    WaitReason.STATE: "for a step that computed the prefix it starts with",
    WaitReason.STEP: "for the step that was under way",
    WaitReason.GRAMMAR: "for its grammar to be compiled",
    WaitReason.ADAPTER: "for its adapter, or for a slot for it",
    WaitReason.INPUT: "for the rest of its prompt",
    WaitReason.VERDICT: "for an output hook",
    WaitReason.COPIES: "for its K/V to be copied to the device",
}

_BEHIND = (WaitReason.PLACES, WaitReason.TOKENS, WaitReason.BLOCKS)
"""Waits for something that others have."""

_CAUSES = {
    PreemptionCause.BLOCKS: "since K/V blocks ran out",
    PreemptionCause.SPARE: "since it runs on spare capacity and others came",
    PreemptionCause.IDLE: "while it waited for more of its prompt",
    PreemptionCause.MEMORY: "since the device lost all K/V (sleep, new weights or a lost step)",
    PreemptionCause.RESET: "since the prefix cache was reset with the requests that ran",
    PreemptionCause.RESULT: "since tokens that it had computed could not be kept",
}

_PLACES = {
    "tools": "the tools. Send the same ones in the same order",
    "system": "the system prompt. Move what changes, such as a date, behind what stays",
    "effort": "the reasoning effort, which the template writes",
    "verbosity": "the verbosity, which the template writes",
    "settings": "other settings that the template reads, such as chat_template_kwargs",
    "generation_prompt": "the beginning of an answer, which the template writes differently when "
    "the answer is there",
    "template": "a part that both requests have and that the chat template wrote differently, such "
    "as a date, or thinking that it leaves out",
    "prompt": "the prompt",
}

_LOADS = {
    LoadOutcome.DECLINED: "computing was faster than loading",
    LoadOutcome.LATE: "the load took too long",
    LoadOutcome.LOST: "the load failed",
}


_ALONE = {
    MissKind.NOTHING_BEFORE: "No earlier prompt of this key that is remembered begins alike.",
    MissKind.OFF: "Prefixes are not cached (enable_prefix_caching).",
    MissKind.WHOLE: "It asks for values of every prompt token, so all of them were computed.",
}
"""Reasons without an earlier prompt."""

_LOST = {
    MissKind.SALT: "another cache_salt",
    MissKind.ADAPTER: "another adapter computed them",
    MissKind.MEDIA: "the image or other media that follow them differ",
    MissKind.WEIGHTS: "the weights were replaced in between",
    MissKind.EMPTIED: "the cache was emptied in between (a reset, sleep or a lost step)",
    MissKind.REPLICA: "another replica computed them",
    MissKind.EVICTED: "their blocks were evicted for other requests. A larger K/V cache, --kv-disk "
    "or a pinned prefix keeps more",
    MissKind.STATE: "no recurrent state was kept at their end, from which it could start",
    MissKind.NOT_YET: "they had not been computed yet when it began",
    MissKind.UNKNOWN: "their blocks were gone, and nothing tells why",
}
"""Reasons why tokens of an earlier prompt could not be used."""


def seen_by(tenant: str, facts: Sequence[RequestFacts]) -> tuple[RequestFacts, ...]:
    """Return facts without the ids of requests of other keys."""

    def seen(other: OtherRequest) -> OtherRequest:
        return OtherRequest(other.request_id if other.tenant == tenant else OTHER_KEY)

    return tuple(
        replace(
            each,
            tenant="",
            behind=tuple(map(seen, each.behind)),
            preemptions=tuple(
                replace(one, by=None if one.by is None else seen(one.by))
                for one in each.preemptions
            ),
        )
        for each in facts
    )


def slow_sentences(timeline: Timeline, facts: Sequence[RequestFacts]) -> list[str]:
    """Return where a request's time went. facts: facts about its prompts, as `seen_by` its caller;
    empty if the engine has forgotten it."""
    found = [_whole(timeline)]
    for number, each in enumerate(facts, start=1):
        said = _of_prompt(each)
        if len(facts) > 1 and said:
            said[0] = f"Prompt {number}: {said[0][0].lower()}{said[0][1:]}"
        found += said
    if not facts:
        is_unknown = timeline.queued_s is None and timeline.error is not None
        never = "It never came to the engine."
        found.append(never if is_unknown else "The engine remembers no more of it.")
    if (pause := _pause(timeline)) is not None:
        found.append(pause)
    if timeline.error is not None:
        found.append(f"It ended with an error: {timeline.error}")
    return found


def _whole(timeline: Timeline) -> str:
    is_over = timeline.finished_s is not None
    end = timeline.finished_s if timeline.finished_s is not None else timeline.now()
    since, parts = 0.0, list[str]()
    for name, until in (
        ("reading the request", timeline.rendered_s),
        ("waiting", timeline.scheduled_s),
        ("the prompt", timeline.first_token_s),
        ("the answer", end),
    ):
        seconds = (end if until is None else until) - since
        if seconds >= SHORTEST_S:
            parts.append(f"{_seconds(seconds)} for {name}")
        if until is None:
            break
        since = until
    text = f"It took {_seconds(end)}" if is_over else f"It has run for {_seconds(end)}"
    return f"{text}: {_listed(parts)}." if parts else f"{text}."


def _of_prompt(facts: RequestFacts) -> list[str]:
    found = [
        f"It {'has waited' if facts.state == 'waiting' else 'waited'} {_seconds(seconds)} "
        f"{_WAITS[WaitReason(name)]}{_behind(facts) if WaitReason(name) in _BEHIND else ''}."
        for name, seconds in sorted(facts.waits.items(), key=lambda each: -each[1])
        if seconds >= SHORTEST_S
    ]
    if facts.num_chunks:
        found.append(
            f"Its prompt was computed in {_count(facts.num_chunks, 'step')}"
            f"{_beside(facts.chunk_rows, 'decoding row')}."
        )
    if facts.num_preemptions:
        times = "once" if facts.num_preemptions == 1 else f"{facts.num_preemptions} times"
        told = "; ".join(map(_preemption, facts.preemptions))
        more = facts.num_preemptions - len(facts.preemptions)
        found.append(f"It was preempted {times}: {told}{f'; and {more} more' if more else ''}.")
    if facts.num_steps:
        found.append(
            f"Its answer took {_count(facts.num_steps, 'step')}"
            f"{_beside(facts.step_rows, 'other row')}."
        )
    return found


def _behind(facts: RequestFacts) -> str:
    if not facts.behind:
        return ""
    names = dict.fromkeys(each.request_id for each in facts.behind)
    mine = [name for name in names if name != OTHER_KEY]
    words = [f"request{'s' if len(mine) > 1 else ''} {_listed(mine)}"] if mine else []
    if OTHER_KEY in names:
        words.append("requests of other keys")
    more = [
        f"{count} more {word}"
        for count, word in (
            (facts.num_running - len(facts.behind), "ran"),
            (facts.num_waiting, "waited"),
        )
        if count > 0
    ]
    return f", behind {' and '.join(words)}{f' ({_listed(more)})' if more else ''}"


def _preemption(one: Preemption) -> str:
    words = _CAUSES[one.cause]
    if one.by is not None:
        name = one.by.request_id
        words += f", which {f'request {name}' if name else 'a request of another key'} needed"
    if one.num_swapped:
        words += f"; {one.num_swapped:,} tokens waited in host memory"
    if one.num_again is None:
        return f"{words}; it has not come back yet"
    again = f"{_count(one.num_again, 'token')} computed again"
    return f"{words}; {again}, after {_seconds(one.seconds or 0.0)}"


def _pause(timeline: Timeline) -> str | None:
    """Return a sentence on the longest pause between two tokens, if it is out of the ordinary."""
    gaps = [later - sooner for sooner, later in pairwise(timeline.chunk_times)]
    if len(gaps) < 3:
        return None
    longest = max(gaps)
    if longest < max(SHORTEST_S, PAUSE_RATIO * median(gaps)):
        return None
    num_before = sum(timeline.chunk_sizes[: gaps.index(longest) + 1])
    return (
        f"The longest pause between two tokens was {_seconds(longest)}, after "
        f"{_count(num_before, 'token')}; the usual one is {_seconds(median(gaps))}."
    )


def cache_sentences(verdict: CacheVerdict) -> list[str]:
    """Return why tokens of a prompt were computed."""
    first = (
        f"Of {_count(verdict.num_prompt, 'prompt token')}, {verdict.num_cached:,} "
        f"{'was' if verdict.num_cached == 1 else 'were'} found in the cache."
    )
    return [first, _reason(verdict)]


def _reason(verdict: CacheVerdict) -> str:
    if verdict.kind in _ALONE:
        return _ALONE[verdict.kind]
    common = (
        f"Request {verdict.compared}, {_seconds(max(verdict.seconds_before, 0.0))} before, has the "
        f"same first {_count(verdict.num_common, 'token')}"
    )
    if verdict.kind is MissKind.NOTHING_MISSED:
        left = verdict.num_common - verdict.num_cached
        return f"{common}{_tail(left, verdict.block_size)}. Nothing of them was missed."
    if verdict.kind is MissKind.DIFFERENCE:
        return (
            f"{common}. Token {verdict.num_common:,} is the first that differs. It lies in "
            f"{_place(verdict.place)}."
        )
    if verdict.kind is MissKind.TIER:
        return f"{common}, but they lay beyond the device, and {_LOADS[verdict.load]}."
    return f"{common}, but {_LOST[verdict.kind]}."


def _tail(num_left: int, block_size: int) -> str:
    return (
        f"; the last {_count(num_left, 'token')} fill no block of {block_size}" if num_left else ""
    )


def _place(place: Place | None) -> str:
    if place is None:
        return _PLACES["prompt"]
    if place.name == "answer" and place.message is None:
        return "what follows the earlier prompt, which is not the answer that it got"
    number = f"message {(place.message or 0) + 1} after the system prompt"
    if place.name == "answer":
        return f"{number}, the earlier answer, which is not written as the model wrote it"
    return f"{number} ({place.role})" if place.name == "message" else _PLACES[place.name]


def _beside(rows: tuple[int, int] | None, word: str) -> str:
    if rows is None or not rows[1]:
        return ", alone"
    fewest, most = rows
    return (
        f" beside {_count(most, word)}" if fewest == most else f" beside {fewest} to {most} {word}s"
    )


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1.0 else f"{1000 * seconds:.0f} ms"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""

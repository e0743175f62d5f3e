"""Answers in the words of each family, after its published format. What a user could have said
stands between marks, so that it is spelled by tokens that are no markers."""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.text.rendering import Tokenizer
from tests.dialect.answers import Answer, Call

__all__ = ["WRITERS", "encoded", "plain"]

_OPEN, _CLOSE = "\ue000", "\ue001"


def data(value: object) -> str:
    """JSON, spelled."""
    return spelled(json.dumps(value, ensure_ascii=False))


def spelled(text: str) -> str:
    return f"{_OPEN}{text}{_CLOSE}"


def plain(text: str) -> str:
    """Without the marks."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def encoded(tokens: Tokenizer, text: str) -> list[int]:
    """Spelled text character by character."""
    ids: list[int] = []
    for i, part in enumerate(text.replace(_CLOSE, _OPEN).split(_OPEN)):
        pieces = [part] if i % 2 == 0 else list(part)
        for piece in pieces:
            ids += tokens.encode(piece, add_special_tokens=False) if piece else []
    return ids


def thought(answer: Answer) -> str:
    return f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""


def hermes(answer: Answer) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {data(given)}}}\n</tool_call>'
        for name, given in answer.calls
    ]
    return thought(answer) + "\n".join([*([answer.text] if answer.text else []), *calls])


def generic(answer: Answer) -> str:
    if not answer.calls:
        return f'{{"response": {data(answer.text)}}}'
    return f'{{"tool_calls": [{", ".join(map(_named, answer.calls))}]}}'


def _named(call: Call) -> str:
    return f'{{"name": "{call[0]}", "arguments": {data(call[1])}}}'


def _listed(before: str, after: str) -> Callable[[Answer], str]:
    def write(answer: Answer) -> str:
        calls = f"{before}[{', '.join(map(_named, answer.calls))}]{after}"
        return thought(answer) + answer.text + (calls if answer.calls else "")

    return write


def quire(answer: Answer) -> str:
    return answer.text + "".join(f"<|tool_call|>{_named(call)}" for call in answer.calls)


def llama3(answer: Answer) -> str:
    calls = [f'{{"name": "{name}", "parameters": {data(given)}}}' for name, given in answer.calls]
    return answer.text + "; ".join(calls)


def pythonic(before: str = "", after: str = "") -> Callable[[Answer], str]:
    def write(answer: Answer) -> str:
        calls = [
            f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in given.items())})"
            for name, given in answer.calls
        ]
        inner = f"{before}[{', '.join(calls)}]{after}"
        return thought(answer) + answer.text + (inner if answer.calls else "")

    return write


def _literal(value: object) -> str:
    return data(value) if isinstance(value, str) else spelled(repr(value))


def tagged(value: object) -> str:
    return spelled(value) if isinstance(value, str) else data(value)


def qwen3_coder(answer: Answer) -> str:
    calls = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{tagged(v)}\n</parameter>\n" for k, v in given.items())
        + "</function>\n</tool_call>"
        for name, given in answer.calls
    ]
    return thought(answer) + "\n".join([*([answer.text] if answer.text else []), *calls])


def glm45(answer: Answer) -> str:
    calls = [
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{tagged(v)}</arg_value>\n"
            for k, v in given.items()
        )
        + "</tool_call>"
        for name, given in answer.calls
    ]
    return thought(answer) + "\n".join([*([answer.text] if answer.text else []), *calls])


def mistral(answer: Answer) -> str:
    return (
        _listed("[TOOL_CALLS]", "")(answer)
        .replace("<think>\n", "[THINK]")
        .replace("\n</think>\n\n", "[/THINK]")
    )


def deepseek_v3(answer: Answer) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{data(given)}\n```"
        "<｜tool▁call▁end｜>"
        for name, given in answer.calls
    ]
    section = "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"
    return thought(answer) + answer.text + (section if calls else "")


def deepseek_v31(answer: Answer) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{data(given)}<｜tool▁call▁end｜>"
        for name, given in answer.calls
    ]
    section = "<｜tool▁calls▁begin｜>" + "".join(calls) + "<｜tool▁calls▁end｜>"
    return thought(answer) + answer.text + (section if calls else "")


def deepseek_v32(answer: Answer) -> str:
    calls = [
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">'
            f"{tagged(v)}</｜DSML｜parameter>\n"
            for k, v in given.items()
        )
        + "</｜DSML｜invoke>\n"
        for name, given in answer.calls
    ]
    section = f"<｜DSML｜function_calls>\n{''.join(calls)}</｜DSML｜function_calls>"
    return thought(answer) + answer.text + (section if calls else "")


def kimi_k2(answer: Answer) -> str:
    calls = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{data(given)}"
        "<|tool_call_end|>"
        for i, (name, given) in enumerate(answer.calls)
    ]
    section = f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"
    return thought(answer) + answer.text + (section if calls else "")


WRITERS: dict[str, Callable[[Answer], str]] = {
    "hermes": hermes,
    "generic": generic,
    "quire": quire,
    "granite": _listed("<|tool_call|>", ""),
    "phi4_mini_json": _listed("<|tool_call|>", "<|/tool_call|>"),
    "mistral": mistral,
    "llama3_json": llama3,
    "pythonic": pythonic(),
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": deepseek_v32,
    "kimi_k2": kimi_k2,
}

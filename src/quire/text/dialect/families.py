"""The named dialects, after the published formats of their families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.text.dialect.spec import ArgumentStyle, Dialect, IdStyle, ParameterSyntax

__all__ = ["DIALECTS", "GENERIC", "VARIANTS"]

_THINK = ("<think>", "</think>")

HERMES = Dialect(
    name="hermes",
    open='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    close="}\n</tool_call>",
    separator="\n",
    thinking=_THINK,
    markers=("<tool_call>", "</tool_call>"),
)
QWEN3_CODER = Dialect(
    name="qwen3_coder",
    open="<tool_call>\n<function=",
    middle=">\n",
    close="</function>\n</tool_call>",
    separator="\n",
    style=ArgumentStyle.RAW,
    parameter=ParameterSyntax("<parameter=", ">\n", "\n</parameter>\n"),
    thinking=_THINK,
    markers=("<tool_call>", "</tool_call>"),
)
GLM45 = Dialect(
    name="glm45",
    open="<tool_call>",
    middle="\n",
    close="</tool_call>",
    separator="\n",
    style=ArgumentStyle.RAW,
    parameter=ParameterSyntax("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    thinking=_THINK,
    stops=("<|observation|>", "<|user|>"),
    markers=(
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ),
)  # fmt: skip
GLM47 = replace(
    GLM45,
    middle="",
    separator="",
    parameter=ParameterSyntax("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
)
LLAMA3_JSON = Dialect(
    name="llama3_json",
    open='{"name": "',
    middle='", "parameters": ',
    close="}",
    separator="; ",
    is_bare=True,
    stops=("<|eot_id|>", "<|eom_id|>"),
)
PYTHONIC = Dialect(
    name="pythonic",
    section=("[", "]"),
    open="",
    middle="(",
    close=")",
    separator=", ",
    style=ArgumentStyle.PYTHON,
    is_bare=True,
)
LFM2 = replace(
    PYTHONIC,
    section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
    is_bare=False,
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    thinking=_THINK,
)
LLAMA4 = replace(
    LFM2,
    section=("<|python_start|>[", "]<|python_end|>"),
    markers=("<|python_start|>", "<|python_end|>"),
    thinking=None,
)
MISTRAL = Dialect(
    name="mistral",
    section=("[TOOL_CALLS][", "]"),
    open='{"name": "',
    middle='", "arguments": ',
    id_close=', "id": "',
    close="}",
    separator=", ",
    ids=IdStyle.SHORT,
    thinking=("[THINK]", "[/THINK]"),
    markers=("[TOOL_CALLS]",),
)
MISTRAL_V11 = replace(
    MISTRAL,
    section=("", ""),
    open="[TOOL_CALLS]",
    id_open="[CALL_ID]",
    middle="[ARGS]",
    id_close="",
    close="",
    separator="",
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
MISTRAL_V13 = replace(MISTRAL_V11, id_open="", markers=("[TOOL_CALLS]", "[ARGS]"))
DEEPSEEK_V3 = Dialect(
    name="deepseek_v3",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    close="\n```<｜tool▁call▁end｜>",
    separator="\n",
    thinking=_THINK,
    markers=(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
)  # fmt: skip
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    open="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
    separator="",
)
DEEPSEEK_V32 = Dialect(
    name="deepseek_v32",
    section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    open='<｜DSML｜invoke name="',
    middle='">\n',
    close="</｜DSML｜invoke>\n",
    style=ArgumentStyle.RAW,
    parameter=ParameterSyntax(
        '<｜DSML｜parameter name="',
        '" string="true">',
        "</｜DSML｜parameter>\n",
        '" string="false">',
    ),
    thinking=_THINK,
    markers=("<｜DSML｜function_calls>", "｜DSML｜"),
)
KIMI_K2 = Dialect(
    name="kimi_k2",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    open="<|tool_call_begin|>functions.",
    id_open=":",
    middle="<|tool_call_argument_begin|>",
    close="<|tool_call_end|>",
    ids=IdStyle.COUNTED,
    thinking=_THINK,
    markers=(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
)  # fmt: skip
PHI4_MINI_JSON = Dialect(
    name="phi4_mini_json",
    section=("<|tool_call|>[", "]<|/tool_call|>"),
    open='{"name": "',
    middle='", "arguments": ',
    close="}",
    separator=", ",
    markers=("<|tool_call|>", "<|/tool_call|>"),
)
GRANITE = replace(
    PHI4_MINI_JSON, name="granite", section=("<|tool_call|>[", "]"), markers=("<|tool_call|>",)
)
QUIRE = Dialect(
    name="quire",
    open='<|tool_call|>{"name": "',
    middle='", "arguments": ',
    close="}",
    markers=("<|tool_call|>",),
)
HARMONY = Dialect(
    name="openai",
    open="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    close="",
    style=ArgumentStyle.CHANNELS,
    is_single=True,
    stops=("<|return|>", "<|call|>"),
    markers=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
)
GENERIC = Dialect(
    name="generic",
    section=('{"tool_calls": [', "]}"),
    open='{"name": "',
    middle='", "arguments": ',
    close="}",
    separator=", ",
    is_bare=True,
    text_wrap=('{"response": ', "}"),
    describes_tools=True,
    thinking=_THINK,
)

_NAMED = (
    HERMES, QWEN3_CODER, GLM45, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, KIMI_K2, MISTRAL,
    PHI4_MINI_JSON, GRANITE, QUIRE, HARMONY, LLAMA3_JSON, PYTHONIC, GENERIC,
    replace(HARMONY, name="gpt-oss"),
)  # fmt: skip

DIALECTS: Mapping[str, Dialect] = {each.name: each for each in _NAMED}
"""Dialects by the names of vLLM's `--tool-call-parser`, where it has one."""

VARIANTS: Mapping[str, tuple[Dialect, ...]] = {
    "glm45": (GLM45, GLM47),
    "mistral": (MISTRAL, MISTRAL_V11, MISTRAL_V13),
    "pythonic": (PYTHONIC, LFM2, LLAMA4),
}
"""Names that stand for several variants, the usual one first."""

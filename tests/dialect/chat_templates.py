"""Chat templates with tool calls in the forms of the families, written for these tests."""

from __future__ import annotations

__all__ = ["TEMPLATES", "WITHOUT_CALLS", "chatml"]

_CHATML = """{%- if tools %}<|im_start|>system
Tools: {{ tools | map(attribute='function') | list | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}
{%- CALLS %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif -%}"""


def chatml(calls: str, thinks: bool = True) -> str:
    text = _CHATML.replace("{%- CALLS %}", calls)
    return text if thinks else text.replace("think>", "thing>")


_EACH = "{%- for c in m.tool_calls or [] %}{% set f = c.function %}"
_LISTED = """{%- if m.tool_calls %}BEFORE{% for c in m.tool_calls -%}
{{ ', ' if not loop.first }}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments
 | tojson }}ID}{% endfor %}AFTER{% endif %}"""


def listed(before: str, after: str, number: str = "") -> str:
    text = _LISTED.replace("BEFORE", before).replace("AFTER", after)
    return text.replace("\n | tojson", " | tojson").replace("ID", number)


GLM = chatml(
    _EACH
    + """
<tool_call>{{ f.name }}
{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}"""
)

TEMPLATES: dict[str, tuple[str, str]] = {
    "hermes": (
        "hermes",
        chatml(
            _EACH + """
<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>{% endfor %}"""
        ),
    ),
    "hermes without spaces": (
        "hermes",
        chatml(
            _EACH + '<tool_call>{"name":"{{ f.name }}","arguments":{{ f.arguments | tojson }}}'
            "</tool_call>{% endfor %}",
            thinks=False,
        ),
    ),
    "qwen3_coder": (
        "qwen3_coder",
        chatml(
            _EACH + """
<tool_call>
<function={{ f.name }}>
{% for k, v in f.arguments.items() %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}""",
            thinks=False,
        ),
    ),
    "glm45": (
        "glm45",
        GLM,
    ),
    "glm46": (
        "glm45",
        GLM.replace(
            "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
            "{% endif %}",
            "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>\n{% endif %}",
        )
        .replace("assistant\n{% if enable", "assistant{% if enable"),
    ),
    "glm47": (
        "glm45",
        chatml(
            _EACH + "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}"
            "</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}"
            "</tool_call>{% endfor %}"
        ),
    ),
    "mistral": ("mistral", chatml(listed("[TOOL_CALLS][", "]", ', "id": "{{ c.id }}"'), False)),
    "mistral v11": (
        "mistral",
        chatml(
            _EACH + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"
            "{% endfor %}",
            thinks=False,
        ),
    ),
    "mistral v13": (
        "mistral",
        chatml(
            _EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
            thinks=False,
        ).replace("{{ m.content or '' }}", "{{ m.content or '' }}{# [/THINK] #}"),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        chatml(
            """{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls -%}
{{ '\\n' if not loop.first }}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}
```json
{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"""
        ),
    ),
    "deepseek_v31": (
        "deepseek_v31",
        chatml(
            "{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls -%}"
            "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
            "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
            "{% endif %}"
        ),
    ),
    "deepseek_v32": (
        "deepseek_v32",
        chatml(
            """{%- if m.tool_calls %}<｜DSML｜function_calls>
{% for c in m.tool_calls %}<｜DSML｜invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments.items() -%}
<｜DSML｜parameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">{{
v if v is string else v | tojson }}</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
{% endfor %}</｜DSML｜function_calls>{% endif %}"""
        ),
    ),
    "kimi_k2": (
        "kimi_k2",
        chatml(
            "{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls -%}"
            "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
            "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
            "<|tool_calls_section_end|>{% endif %}"
        ),
    ),
    "phi4_mini_json": (
        "phi4_mini_json", chatml(listed("<|tool_call|>[", "]<|/tool_call|>"), False)
    ),
    "granite": ("granite", chatml(listed("<|tool_call|>[", "]"), False)),
    "quire": (
        "quire",
        chatml(
            _EACH + '<|tool_call|>{"name": {{ f.name | tojson }}, "arguments": '
            "{{ f.arguments | tojson }}}{% endfor %}",
            thinks=False,
        ),
    ),
    "llama3_json": (
        "llama3_json",
        chatml(
            "{%- if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
            '{% endif %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
            "{{ m.tool_calls[0].function.arguments | tojson }}}{% endif %}",
            thinks=False,
        ),
    ),
    "pythonic": (
        "pythonic",
        chatml(
            "{%- if m.tool_calls %}[{% for c in m.tool_calls -%}{{ ', ' if not loop.first }}"
            "{{ c.function.name }}({% for k, v in c.function.arguments.items() -%}"
            "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson if v is string else v }}"
            "{% endfor %}){% endfor %}]{% endif %}",
            thinks=False,
        ),
    ),
    "lfm2": (
        "pythonic",
        chatml(
            "{%- if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls -%}"
            "{{ ', ' if not loop.first }}{{ c.function.name }}("
            "{% for k, v in c.function.arguments.items() -%}"
            "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson if v is string else v }}"
            "{% endfor %}){% endfor %}]<|tool_call_end|>{% endif %}",
            thinks=False,
        ),
    ),
}  # fmt: skip
"""Name of the dialect, and the template, by form."""

WITHOUT_CALLS = chatml("", thinks=False)

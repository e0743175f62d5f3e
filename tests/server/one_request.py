"""Bodies of one request, and the tokens of the bundled model that its tests name."""

from __future__ import annotations

from typing import Any

import httpx

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = [50, 60, 70]
A, SPACE_A, B, Q = 74, 274, 75, 90
"""Token ids of "a", " a" and two other letters; "qq" is two tokens, and " q" is another."""
TOOL, TOOL_TEXT = 7, "<|tool|>"
"""A special token that does not end sequences by itself."""
END, END_TEXT = 9, "<|end|>"
"""One that does."""


def post(http: httpx.Client, path: str, fields: dict[str, Any]) -> httpx.Response:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
    return http.post(path, json={**base, **fields})

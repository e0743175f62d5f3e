"""`quire run-batch` as a program: an engine of its own, and answers in a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from quire.bundled import bundled_model_path
from tests.lora.adapters import write_adapter


def test_a_file_is_answered(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "bundled", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(3)
    ]
    source.write_text("\n".join(map(json.dumps, [*lines, {"custom_id": "bad"}])))
    command = [sys.executable, "-m", "quire", "run-batch", "-i", str(source), "-o", str(target)]
    options = ["--max-model-len", "512", "--num-kv-blocks", "256"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "4 requests answered; 1 without a good answer." in done.stderr
    *good, bad = [json.loads(text) for text in target.read_text().splitlines()]
    assert [each["custom_id"] for each in good] == ["0", "1", "2"]
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 4 for each in good)
    assert bad["response"] is None and bad["error"]["message"]


def test_lines_name_adapters(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "red", bundled_model_path(), ("v_proj",), strength=0.3)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body: dict[str, Any] = {"prompt": "The", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": name, "method": "POST", "url": "/v1/completions",
            "body": {**body, "model": name},
        }
        for name in ("bundled", "pinned", "unknown")
    ]  # fmt: skip
    source.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "quire", "run-batch", "-i", str(source), "-o", str(target)]
    options = ["--max-model-len", "512", "--num-kv-blocks", "256", "--enable-lora"]
    done = subprocess.run(
        [*command, *options, "--lora-modules", f"pinned={adapter}"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    plain, adapted, unknown = [json.loads(line) for line in target.read_text().splitlines()]
    assert unknown["response"]["status_code"] == 404
    bodies = [each["response"]["body"] for each in (plain, adapted)]
    assert [each["model"] for each in bodies] == ["bundled", "pinned"]
    assert bodies[0]["choices"][0]["text"] != bodies[1]["choices"][0]["text"]

"""`quire run-batch` as a program: an engine of its own, and answers in a file."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from quire.bundled import bundled_model_path
from tests.lora.adapters import write_adapter
from tests.waiting import WAIT_S


def test_a_file_is_answered_through_a_link(tmp_path: Path) -> None:
    """Fault: the link was replaced by a file."""
    source, target = tmp_path / "in.jsonl", tmp_path / "link"
    answers = tmp_path / "answers.jsonl"
    target.symlink_to(answers)
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
    assert target.is_symlink() and sorted(tmp_path.iterdir()) == sorted([source, target, answers])
    *good, bad = [json.loads(text) for text in answers.read_text().splitlines()]
    assert [each["custom_id"] for each in good] == ["0", "1", "2"]
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 4 for each in good)
    assert bad["response"] is None and bad["error"]["message"]


def test_lines_name_adapters_and_a_pipe_takes_the_answers(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "red", bundled_model_path(), ("v_proj",), strength=0.3)
    source, target = tmp_path / "in.jsonl", tmp_path / "pipe"
    os.mkfifo(target)
    found = list[str]()
    reader = threading.Thread(target=lambda: found.append(target.read_text()), daemon=True)
    reader.start()
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
    assert stat.S_ISFIFO(target.stat().st_mode)
    reader.join(WAIT_S)
    plain, adapted, unknown = [json.loads(line) for line in found[0].splitlines()]
    assert unknown["response"]["status_code"] == 404
    bodies = [each["response"]["body"] for each in (plain, adapted)]
    assert [each["model"] for each in bodies] == ["bundled", "pinned"]
    assert bodies[0]["choices"][0]["text"] != bodies[1]["choices"][0]["text"]

"""A server on loopback that says what a test tells it to; one thread per connection."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Script", "serve_script"]


@dataclass
class Script:
    """words: pieces of an answer, each a chunk and a token. thoughts: pieces of reasoning before
    them, in chats. gap_s: seconds between two pieces. fail: fault of a completion: "refuse" (400),
    "error" (in the stream), "cut" (no [DONE]), "reset". starting: number of times that `/v1/models`
    answers 503 first. card: more fields of the first model there. max_messages: most messages of a
    chat; more are refused. num_prompt_tokens: number in usage. seen: paths and bodies of the
    requests that came."""

    words: Sequence[str] = ("Hello", " there", ".")
    thoughts: Sequence[str] = ()
    gap_s: float = 0.0
    fail: str | None = None
    starting: int = 0
    api_key: str | None = None
    card: dict[str, Any] = field(default_factory=dict)
    max_messages: int = 1000
    num_prompt_tokens: int = 4
    num_connections: int = 0
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    closed_early: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serve_script(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The server's address, while it runs."""

    class Handler(_Handler):
        pass

    Handler.script = script
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{server.server_port}"
    finally:
        script.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    script: Script

    def setup(self) -> None:
        super().setup()
        self.script.num_connections += 1

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.script.starting > 0:
            self.script.starting -= 1
            self._reply(503, {"error": {"message": "The engine is starting (loading)."}})
        elif self._is_allowed():
            self._reply(
                200,
                {
                    "data": [
                        {"id": "tiny", "max_model_len": 256, **self.script.card},
                        {"id": "other"},
                    ]
                },
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.script.seen.append((self.path, body))
        if not self._is_allowed():
            return
        if self.path == "/tokenize":
            self._reply(200, {"tokens": [3, 5, 9, 3]})
        elif self.path == "/detokenize":
            self._reply(200, {"prompt": " ".join(map(str, body["tokens"]))})
        elif len(body.get("messages", ())) > self.script.max_messages:
            said = "This model's maximum context length is 256 tokens."
            self._reply(400, {"error": {"message": said}})
        elif self.script.fail == "refuse":
            self._reply(400, {"error": {"message": "temperature is 9.0. Give at most 2."}})
        else:
            try:
                self._stream(body)
            except OSError:
                self.script.closed_early.set()
                self.close_connection = True

    def _is_allowed(self) -> bool:
        key = self.script.api_key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return True
        self._reply(401, {"error": {"message": "There is no such key."}})
        return False

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_chat = "messages" in body
        words = list(self.script.words)
        if body.get("ignore_eos"):
            words = ["x"] * body["max_tokens"]
        if is_chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for thought in self.script.thoughts:
                self._event({"choices": [{"delta": {"reasoning_content": thought}}]})
        for index, word in enumerate(words):
            self.script.is_over.wait(self.script.gap_s)
            if self.script.fail == "error" and index == 1:
                self._event({"error": {"message": "the engine was restarted"}})
            if self.script.fail == "reset" and index == 1:
                self.close_connection = True
                return
            choice = {"delta": {"content": word}} if is_chat else {"text": word}
            ends = "stop" if index == len(words) - 1 else None
            self._event({"choices": [{**choice, "finish_reason": ends}]})
        usage = {"prompt_tokens": self.script.num_prompt_tokens, "completion_tokens": len(words)}
        self._event({"choices": [], "usage": usage})
        if self.script.fail != "cut":
            self._chunk(b": a comment\n\ndata: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _reply(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

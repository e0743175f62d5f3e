"""Every bound that the server puts on a request, in one place. The defaults are safe; a request may
only ask for less. The figures follow docs/server.md, "Limits"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from quire.base.errors import ConfigError

__all__ = ["LIMIT_HELP", "Limits"]


def _limit(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


LEAST_QUEUE_S, LEAST_FIRST_TOKEN_S = 60.0, 300.0
"""Lower bounds of the time limits, which a fast machine needs under load. A large model on a CPU
needs longer for one long prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a server. Units are in the names. None means that the value follows from the model
    (see the help of each)."""

    # Bounds on one connection.
    max_header_bytes: int = _limit(32 * 1024, "bytes of the request line and all headers")
    max_headers: int = _limit(100, "headers of one request")
    header_timeout_s: float = _limit(10.0, "seconds until all headers have arrived")
    max_body_bytes: int = _limit(8 * 2**20, "bytes of one request body")
    body_timeout_s: float = _limit(30.0, "seconds until the body has arrived, and 1 s per MiB")
    max_body_bytes_in_flight: int = _limit(2**30, "bytes of all bodies that are being read")
    max_connections: int = _limit(4096, "open connections")
    keep_alive_timeout_s: float = _limit(30.0, "seconds that an idle connection is kept")

    # Bounds on one body.
    max_json_depth: int = _limit(64, "nesting of a request body")
    max_json_nodes: int = _limit(200_000, "values in a request body")
    max_json_key_bytes: int = _limit(256, "bytes of one key in a request body")
    max_messages: int = _limit(2048, "messages of a chat")
    max_content_parts: int = _limit(256, "content parts of one message")
    max_prompt_chars: int | None = _limit(
        None, "characters of a prompt before it is tokenized (8 x max_model_len + 65,536)"
    )
    max_chat_template_chars: int = _limit(65_536, "characters of a chat_template in a request")
    render_timeout_s: float = _limit(
        10.0, "seconds until chat template and tokenizer are done with a long prompt"
    )
    max_label_chars: int = _limit(128, "characters of cache_salt and request ids")

    # Bounds on one request.
    max_n: int = _limit(16, "samples per prompt (at most 128)")
    max_beam_width: int = _limit(8, "beams of one search (best_of, or else n; at most 128)")
    max_sequences: int = _limit(256, "prompts x n of one completion request")
    max_embedding_inputs: int = _limit(2048, "texts of one request for vectors or scores")
    max_logprobs: int = _limit(20, "top_logprobs, logprobs and prompt_logprobs")
    max_logprobs_bytes: int = _limit(32 * 2**20, "bytes of log-probabilities in one response")
    max_stop: int = _limit(16, "stop strings")
    max_stop_chars: int = _limit(256, "characters of one stop string")
    max_stop_token_ids: int = _limit(64, "stop_token_ids")
    max_logit_bias: int = _limit(1024, "entries of logit_bias")
    max_allowed_token_ids: int = _limit(4096, "entries of allowed_token_ids")
    max_bad_words: int = _limit(64, "entries of bad_words")
    max_hooks: int = _limit(16, "entries of hooks")

    max_priority: int = _limit(100, "levels of priority above and below 0")

    # Bounds on what is kept for later requests.
    max_stored_responses: int = _limit(4096, "responses that are kept")
    max_stored_bytes: int = _limit(256 * 2**20, "bytes of responses that are kept")
    stored_response_s: float = _limit(86_400.0, "seconds for which an unused response is kept")
    max_background_responses: int = _limit(256, "responses that are made in the background")

    max_sessions: int = _limit(4096, "conversations that are kept by their session_id")
    max_session_bytes: int = _limit(256 * 2**20, "bytes of conversations that are kept")
    session_s: float = _limit(86_400.0, "seconds for which an unused conversation is kept")
    max_receipts: int = _limit(4096, "receipts that are kept")
    max_receipt_bytes: int = _limit(64 * 2**20, "bytes of receipts that are kept")
    receipt_s: float = _limit(86_400.0, "seconds for which a receipt is kept")
    max_adapters: int = _limit(1024, "adapters that are loaded by a request, and that are listed")
    max_named_images: int = _limit(4096, "images that are kept by their uuid")
    max_named_image_bytes: int = _limit(256 * 2**20, "bytes of images that are kept by their uuid")
    max_file_bytes: int = _limit(64 * 2**20, "bytes of one uploaded file")
    max_kept_files: int = _limit(4096, "files that are kept")
    max_kept_file_bytes: int = _limit(4 * 2**30, "bytes of uploaded files and answers of batches")
    max_open_batches: int = _limit(256, "batches that have not ended")
    max_batch_lines: int = _limit(50_000, "requests of one batch")

    # Bounds on the server's load.
    max_queue_requests: int | None = _limit(
        None, "requests that wait for their first step (4 x max_num_seqs, at least 256)"
    )
    max_queue_tokens: int | None = _limit(
        None, "prompt tokens that wait (30 s of the measured rate, at least 4 x max_model_len)"
    )
    max_queue_s: float | None = _limit(
        None,
        "seconds that a request may wait for its first step (60, or twice what the prompts before "
        "it take at the measured speed)",
    )
    max_requests_per_key: int | None = _limit(
        None, "requests of one API key at once (64 when there are several keys)"
    )
    first_token_timeout_s: float | None = _limit(
        None,
        "seconds from arrival to the first token (300, or twice what its prompt and those before "
        "it take at the measured speed)",
    )
    total_timeout_s: float = _limit(3600.0, "seconds from arrival to the last token")
    stalled_write_timeout_s: float = _limit(
        30.0, "seconds for which a client may take nothing of a response"
    )
    sse_keep_alive_s: float = _limit(
        15.0, "seconds of silence before a stream sends a comment or a WebSocket a ping"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(
                    f"{item.name} is {value!r}, but a limit is a number above 0. "
                    f"It bounds: {item.metadata['help']}."
                )
        if self.max_n > 128:
            raise ConfigError(f"max_n is {self.max_n}: the engine takes at most 128 samples.")
        if self.max_beam_width > 128:
            raise ConfigError(
                f"max_beam_width is {self.max_beam_width}: the engine takes at most 128 beams."
            )
        if self.max_logprobs > 1024:
            raise ConfigError(
                f"max_logprobs is {self.max_logprobs}: the engine gives at most 1,024."
            )

    def prompt_chars(self, max_model_len: int) -> int:
        """Most characters of a prompt that is worth tokenizing."""
        return self.max_prompt_chars or 8 * max_model_len + 65_536

    def queue_requests(self, max_num_seqs: int) -> int:
        """Most requests that may wait."""
        return self.max_queue_requests or max(256, 4 * max_num_seqs)

    def queue_tokens(self, max_model_len: int, prefill_tokens_per_s: float) -> int:
        """Most prompt tokens that may wait, at the measured rate of prefill (0: not known)."""
        if self.max_queue_tokens is not None:
            return self.max_queue_tokens
        return max(4 * max_model_len, int(30 * prefill_tokens_per_s))

    def queue_s(self, num_tokens: int, prefill_tokens_per_s: float) -> float:
        """Longest wait for the first step behind prompts of this many tokens; a speed of 0 is
        unknown."""
        if self.max_queue_s is not None:
            return self.max_queue_s
        return max(LEAST_QUEUE_S, _patience(num_tokens, prefill_tokens_per_s))

    def first_token_s(self, num_tokens: int, prefill_tokens_per_s: float) -> float:
        """Longest time to the first token. num_tokens: including the prompt's own."""
        if self.first_token_timeout_s is not None:
            return self.first_token_timeout_s
        return max(LEAST_FIRST_TOKEN_S, _patience(num_tokens, prefill_tokens_per_s))

    def requests_per_key(self, num_keys: int) -> int | None:
        """Most requests of one key at once; None for no limit."""
        return self.max_requests_per_key or (64 if num_keys > 1 else None)


def _patience(num_tokens: int, prefill_tokens_per_s: float) -> float:
    """Return twice the time that they take, since others decode meanwhile."""
    return 2 * num_tokens / prefill_tokens_per_s if prefill_tokens_per_s > 0 else 0.0


LIMIT_HELP: Mapping[str, str] = {item.name: item.metadata["help"] for item in fields(Limits)}
"""Help of each limit, by name."""

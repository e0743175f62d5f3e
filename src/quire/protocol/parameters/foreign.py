"""Parameters of other engines that have no counterpart here."""

from __future__ import annotations

from collections.abc import Mapping

from quire.base.foreign import ForeignName

__all__ = ["FOREIGN_PARAMS"]

_OF_BEAMS = "LLM.beam_search with BeamSearchParams does it"

FOREIGN_PARAMS: Mapping[str, ForeignName] = {
    "guided_decoding": ForeignName("structured_outputs=StructuredOutputsParams(…) does it"),
    "best_of": ForeignName("ask for n samples, and take the best by cumulative_logprob", ("1",)),
    "use_beam_search": ForeignName(_OF_BEAMS),
    "length_penalty": ForeignName(_OF_BEAMS, ("1", "1.0")),
    "early_stopping": ForeignName(_OF_BEAMS),
    "extra_args": ForeignName("nothing reads further arguments; logits_processors are functions"),
    "flat_logprobs": ForeignName("log-probabilities are one dict for each token"),
    "logits_processors_kwargs": ForeignName("a function can be given its arguments before"),
    "skip_clone": ForeignName("parameters are never copied", None),
    "skip_reading_prefix_cache": ForeignName("a cache_salt of the prompt's own does the same"),
    "thinking_token_budget": ForeignName("answers are not parsed for reasoning yet"),
    "output_text_buffer_length": ForeignName("it follows from stop", None),
    "stop_reason": ForeignName("outputs tell it"),
}
"""Parameters of vLLM's that have no counterpart, in Python and in requests. A name that means a
parameter stands in its declaration (`others`)."""

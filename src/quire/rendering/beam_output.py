"""Results of a beam search, in the shape that its callers know."""

from __future__ import annotations

import math

from quire.protocol.beam_search import BeamRules
from quire.protocol.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from quire.rendering.tokenizer import Tokenizer

__all__ = ["beam_search_output"]


def beam_search_output(
    output: RequestOutput, rules: BeamRules, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """Make the output of a request that has ended; without a tokenizer texts are empty."""
    if output.error is not None:
        tokens = list(output.prompt_token_ids)
        failed = BeamSearchSequence(tokens, output.prompt or "", -math.inf, -math.inf)
        failed.finish_reason = "error"
        return BeamSearchOutput([failed], output.error)
    sequences: list[BeamSearchSequence] = []
    for found in output.outputs:
        tokens = [*output.prompt_token_ids, *found.token_ids]
        cum_logprob = found.cumulative_logprob or 0.0
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                text="" if tokenizer is None else tokenizer.decode(tokens),
                cum_logprob=cum_logprob,
                score=rules.score(cum_logprob, len(found.token_ids)),
                logprobs=found.logprobs,
                finish_reason=found.finish_reason,
                stop_reason=found.stop_reason,
            )
        )
    return BeamSearchOutput(sequences)

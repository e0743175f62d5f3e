"""`speculative_config`: the values that it takes, and those that it refuses, with their
sentences."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.config.settings import EngineSettings
from quire.config.speculation import SpeculationSettings, parse_speculation


def parse(given: object) -> SpeculationSettings | None:
    return parse_speculation(
        EngineSettings.from_options({"speculative_config": given}).speculative_config
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, None),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}, (3, 4, 4)),
        ('{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}', (5, 2, 4)),
        ({"method": "ngram", "prompt_lookup_min": 7}, (5, 7, 7)),
        ({"model": "[ngram]", "num_speculative_tokens": 2}, (2, 5, 5)),
        ({"method": "auto"}, (8, 2, 5)),
        ({"model": "some/draft"}, (4, 5, 5)),
        ({"method": "draft_model", "model": "some/draft"}, (4, 5, 5)),
        ({"method": "eagle3", "model": "some/head", "num_speculative_tokens": 2}, (2, 5, 5)),
        ({"method": "mtp"}, (4, 5, 5)),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, (1, 5, 5)),
    ],
    ids=str,
)
def test_what_is_taken(given: object, expected: tuple[int, int, int] | None) -> None:
    found = parse(given)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert expected == (
            found.num_speculative_tokens, found.prompt_lookup_min, found.prompt_lookup_max,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"method": "ngam"}, "method='ngam'"),
        ({"num_speculative_tokens": 3}, "method=None"),
        ({"method": "mlp_speculator", "model": "x"}, "not offered yet"),
        ({"method": "mtp", "model": "x"}, "method='mtp' does not read"),
        ({"method": "medusa"}, "model=None. Name the weights of medusa"),
        ({"method": "draft_model"}, "model=None. Name the draft model"),
        ({"method": "draft_model", "model": 3}, "model=3. Name the draft model"),
        ({"method": "ngram", "model": "x"}, "does not read"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "from 1 to 64"),
        ({"method": "ngram", "num_speculativ_tokens": 2}, "Did you mean num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "swap them"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "from 0 to 1"),
        ("ngram", "an object such as"),
        ("[1]", "an object such as"),
    ],
    ids=str,
)
def test_what_is_refused(given: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse(given)

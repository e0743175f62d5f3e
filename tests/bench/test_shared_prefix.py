"""The benchmarks of shared prefixes: the changes that sharing makes."""

from __future__ import annotations

import importlib

import pytest

from quire.entrypoints.llm import LLM


def test_a_shared_prefix_lets_more_requests_run_at_once() -> None:
    """Turns red when the simulated cache or pin is not hit."""
    simulated = importlib.import_module("benchmarks.cache.shared_prefix_simulated")
    translation = importlib.import_module("benchmarks.cache.translation")
    work = translation.draw_translations(300, 32000, seed=1)
    prefix = translation.make_prefix(341, 32000)
    assert len(work.prompts(prefix)[0]) == 341 + len(work.sentences[0])
    rates: dict[str, float] = {}
    for system in simulated.SYSTEMS:
        served = simulated.simulate(system, work, prefix, [0.0] * 300)
        rates[system] = served.requests_per_s
        assert served.normalized_latency_s > 0
        assert min(served.first_token_s) > 0
    assert rates["pinned"] > rates["cached"] > 2 * rates["off"]
    assert rates["off"] > rates["orca"]


def test_the_engines_run_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a system of the measured part cannot be opened, or nothing is shared."""
    measured = importlib.import_module("benchmarks.cache.shared_prefix")
    monkeypatch.setattr(measured, "PREFIX_TOKENS", (80,))
    engines: dict[str, LLM] = {system: measured.open_engine(system) for system in measured.SYSTEMS}
    try:
        figures = measured.measure(engines, count=4, repeats=1)
        cached = {
            system: llm.engine.client.stats().cached_tokens_total for system, llm in engines.items()
        }
    finally:
        for llm in engines.values():
            llm.shutdown()
    assert figures["80.off.times_off"].median == 1.0
    assert figures["80.pinned.requests_per_s"].median > 0
    assert cached["off"] == 0
    assert cached["cached"] == 7 * 80  # all but the first of eight
    assert cached["pinned"] == 8 * 80

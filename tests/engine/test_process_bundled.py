"""The bundled model in a process of its own: in-process = other process, and a core that is killed
is replaced by one that continues each stream to the byte."""

from __future__ import annotations

import asyncio
import os
import signal

from quire import LLM
from quire import SamplingParams as Params
from quire.bundled import bundled_model_path
from quire.engine.clients.process_client import ProcessEngineClient
from quire.protocol.status import EngineState
from tests.engine.process_harness import (
    Collected,
    ask,
    collect,
    hosted,
    run,
    until_begun,
    until_state,
)

LENGTH = 24
SETTINGS = {
    "model": str(bundled_model_path()),
    "max_model_len": 256,
    "swap_space": 2**24,  # bytes by now: a bare number is GiB only where a user gives it
    "num_kv_blocks": 128,
    "quiet": True,
}
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.8, "seed": 3, "n": 3, "top_p": 0.95},
    {"temperature": 0.7, "seed": 11, "frequency_penalty": 0.5, "logprobs": 2},
)


def _uncut(prompts: list[list[int]]) -> list[dict[int, list[int]]]:
    with LLM(**{**SETTINGS, "swap_space": "16MiB"}) as llm:
        params = [Params(max_tokens=LENGTH, ignore_eos=True, **kind) for kind in KINDS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [{o.index: o.token_ids for o in output.outputs} for output in outputs]


async def _start(client: ProcessEngineClient, prompts: list[list[int]]):
    founds = [Collected() for _ in KINDS]
    tasks = [
        asyncio.ensure_future(collect(await ask(client, prompt, max_tokens=LENGTH, **kind), found))
        for prompt, kind, found in zip(prompts, KINDS, founds, strict=True)
    ]
    return tasks, founds


def test_in_process_equals_other_process_cut_or_not() -> None:
    prompts = [[5 + i, 17, 301, 42, 8] * (2 + i) for i in range(len(KINDS))]
    wanted = _uncut(prompts)

    async def work() -> None:
        async with hosted(settings=SETTINGS, max_replays=5) as host:
            tasks, _ = await _start(host.client, prompts)
            assert [(await task).tokens for task in tasks] == wanted
            for cut in (1, 13):
                tasks, founds = await _start(host.client, prompts)
                await until_begun(founds, cut)
                os.kill(host.supervisor.pid, signal.SIGKILL)
                await until_state(host.client, EngineState.RESTARTING)
                assert [(await task).tokens for task in tasks] == wanted
                for sample in founds[3].logprobs.values():
                    assert [entry.token_id for entry in sample] == wanted[3][0]

    run(work(), 200)

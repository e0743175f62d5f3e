"""Random moves for a `Simulation`: the same generator drives the soak and the property test."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from quire.config.settings import SCHEDULING_POLICIES
from quire.plan.scheduler import PrefillLimits
from quire.plan.scheduler.loads import LOAD_SECONDS
from quire.plan.scheduler.token_budget import UNLIMITED
from quire.protocol import BeamRules, SchedulingParams
from quire.protocol.recovery import ALWAYS_SWAP, RecoveryCosts
from tests.profiles import under_seed
from tests.scheduler.expected import VOCAB
from tests.scheduler.simulated_setup import POISON_OUTSIDE, Setup
from tests.scheduler.simulation import ADAPTERS, Simulation

WINDOWS: tuple[tuple[int | None, ...], ...] = (
    (None,),
    (None,),
    (3,),
    (1,),
    (None, 4),
    (6, None, 2),
    (2, 5),
)


def random_setup(rng: random.Random, policy: str | None = None) -> Setup:
    """Return a random setup. policy: None for any policy."""
    windows = rng.choice(WINDOWS)
    max_num_seqs = rng.randint(1, 6)
    setup = Setup(
        depth=rng.randint(1, 3),
        windows=windows,
        block_size=rng.choice((1, 2, 3, 4)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice((1, 2, 5, 8, 16, 64)),
        max_model_len=rng.choice((12, 24, 36)),
        # with a window of 1 nobody reads what is before, so a poisoned prefix can be skipped
        poison=None if windows == (1,) else rng.choice((None, None, POISON_OUTSIDE, 3)),
        readers_fail=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.9,
        policy=policy or rng.choice(SCHEDULING_POLICIES),
        prefill_limits=PrefillLimits(
            rng.choice((1, 3, 8, UNLIMITED, UNLIMITED)),
            rng.choice((1, 2, UNLIMITED, UNLIMITED)),
            rng.choice((1, UNLIMITED, UNLIMITED)),
        ),
    )
    tokens = rng.choice((8, 16, 30, 60, 200))
    if rng.random() < 0.3:
        setup = replace(setup, names_per_block=tuple(rng.choice((1, 3)) for _ in windows))
    num_blocks = max(setup.layout.blocks_for(tokens), len(windows) + 1)
    num_host_blocks = rng.choice((0, 2, num_blocks // 2, 4 * num_blocks))
    max_drafts = rng.choice((0, 0, 1, 3, 6))
    return replace(
        setup,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_drafts=max_drafts,
        guesses=rng.choice(("any", "any", "wrong", "right", "beyond", "methods", "model")),
        ticket_steps=rng.choice(((0,), (0,), (0, 2, 1), (4, 0, 1))),
        losses=rng.choice((0.0, 0.0, 0.1, 0.6)),
    )


def with_states(rng: random.Random, setup: Setup) -> Setup:
    """The same for a model that has a recurrent state beside layer groups of different blocks."""
    windows = rng.choice(((None, None), (None, 4), (6, None, 2), (None,)))
    setup = replace(
        setup,
        windows=windows,
        names_per_block=(1, 3, 2)[: len(windows)],
        block_size=rng.choice((1, 2, 3)),
        num_checkpoints=rng.choice((0, 1, 2, 6, 20)),
        breaks=rng.choice((0.0, 0.3, 1.0)),
    )
    tokens = rng.choice((16, 30, 60, 200))
    return replace(setup, num_blocks=max(setup.layout.blocks_for(tokens), len(windows) + 1))


def with_sources(rng: random.Random, setup: Setup) -> Setup:
    """The same with evicted blocks in the host, in a source that delays, loses and corrupts, or in
    both. Blocks are few, so that many are evicted; some costs favour loads and no swaps."""
    keeps_evicted = rng.random() < 0.7
    few = setup.layout.blocks_for(rng.choice((16, 30, 40)))
    return replace(
        setup,
        num_blocks=max(few, len(setup.windows) + 1),
        enable_prefix_caching=True,
        recovery_costs=rng.choice((ALWAYS_SWAP, RecoveryCosts(1.0, 0.9 * setup.block_size))),
        keeps_evicted=keeps_evicted,
        num_host_blocks=rng.choice((3, few, 4 * few)) if keeps_evicted else setup.num_host_blocks,
        num_places=rng.choice((1, few, 4 * few)) if rng.random() < 0.7 else None,
        refusals=rng.choice((0.0, 0.0, 0.3)),
        corruptions=rng.choice((0.0, 0.0, 0.3, 1.0)),
        load_seconds=rng.choice((0.0, 0.15, 0.4, LOAD_SECONDS)),
    )


def random_prompt(rng: random.Random, setup: Setup) -> list[int]:
    """A cut of one of three texts, sometimes with an own ending, so that prefixes are shared."""
    text = [(rng.choice((1, 2, 5)) * i) % VOCAB for i in range(4, 40)]
    prompt = text[: rng.randint(1, setup.max_model_len)]
    if rng.random() < 0.4:
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))]
    if setup.poison is not None:
        if rng.random() < 0.15:
            prompt[rng.randrange(len(prompt))] = setup.poison
        elif rng.random() < 0.8:
            prompt = [(token + 1) % VOCAB if token == setup.poison else token for token in prompt]
    return prompt


def random_add(rng: random.Random, simulation: Simulation) -> list[int]:
    setup = simulation.setup
    max_tokens = rng.choice((None, 1, 2, 5, 12, 30))
    stop = frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 3, 7))))
    n, beams = rng.choice((1, 1, 1, 2, 3, 5)), None
    if rng.random() < 0.25:
        beams = BeamRules(
            n + rng.choice((0, 0, 1)),
            rng.choice((0.0, 1.0, 1.5, -1.0)),
            rng.choice((True, False, "never")),
        )
    prompt = random_prompt(rng, setup)
    return simulation.add(
        prompt,
        max_tokens=max_tokens,
        n=n,
        beams=beams,
        seed=rng.randrange(2),
        stop=stop,
        min_tokens=rng.choice((0, 0, min(3, max_tokens or 3))),
        repeats=rng.choice((None, None, (1, 1, 2), (1, 3, 2), (2, 2, 2)))
        if beams is None
        else None,
        salt=rng.choice(("", "", "", "other")),
        resume_at=rng.choice((0, 0, 0, 1, 4)),
        lateness=rng.choice((0.0, 0.0, 0.0, 2.5, 10.0)),
        prompt_logprobs=rng.choice((None, None, None, 0)),
        scheduling=SchedulingParams(
            priority=rng.choice((-2, 0, 3)) if simulation.policy.uses_priority else 0,
            deadline_s=rng.choice((*[None] * 8, 0.5, 4.0)),
            tenant=rng.choice(("", "a", "b")),
            weight=rng.choice((0.5, 1.0, 3.0)),
        ),
        adapter=random_adapter(rng) if beams is None else "",
        is_adapter_late=rng.random() < 0.15,
        message_ends=random_ends(rng, prompt) if setup.has_state else (),
    )


def random_ends(rng: random.Random, prompt: list[int]) -> list[int]:
    """Ends of messages of a prompt."""
    return sorted(rng.sample(range(1, len(prompt) + 1), rng.randint(0, min(4, len(prompt)))))


def random_adapter(rng: random.Random) -> str:
    return rng.choice(("", "", *ADAPTERS))


def random_open(rng: random.Random, simulation: Simulation) -> list[int]:
    """A prompt that arrives in pieces."""
    prompt = random_prompt(rng, simulation.setup)
    return simulation.add(
        prompt,
        max_tokens=rng.choice((1, 2, 5, 12)),
        seed=rng.randrange(2),
        salt=rng.choice(("", "", "other")),
        lateness=rng.choice((0.0, 2.5, 10.0)),
        prompt_logprobs=rng.choice((None, None, 0)),
        given=rng.randint(1, len(prompt)),
        max_prompt_tokens=rng.choice((None, len(prompt), len(prompt) + 3)),
        adapter=random_adapter(rng),
        is_adapter_late=rng.random() < 0.15,
    )


def random_extend(rng: random.Random, simulation: Simulation) -> None:
    """Something that requests wait for comes."""
    if simulation.opening and rng.random() < 0.3:
        simulation.open_adapters()
    elif simulation.arriving:
        simulation.extend(rng.choice(list(simulation.arriving)), rng.randint(0, 6))


def random_pin(rng: random.Random, simulation: Simulation) -> list[int]:
    return simulation.add(
        random_prompt(rng, simulation.setup),
        max_tokens=1,
        salt=rng.choice(("", "", "other")),
        lateness=rng.choice((0.0, 2.5)),
        pin_seconds=rng.choice((0.5, 3.0, 20.0, math.inf)),
        pin_is_shared=rng.random() < 0.5,
        adapter=random_adapter(rng),
        is_adapter_late=rng.random() < 0.15,
    )


def random_return(rng: random.Random, simulation: Simulation) -> list[int]:
    """A client comes back with what it asked and got, and perhaps more."""
    if not simulation.clients:
        return []
    client = simulation.clients[rng.choice(list(simulation.clients))]
    prompt = [*client.asked.prompt, *client.tokens, *[rng.randrange(VOCAB)] * rng.choice((0, 1))]
    return simulation.add(
        prompt,
        max_tokens=rng.choice((1, 2, 5)),
        n=rng.choice((1, 1, 3)),
        seed=rng.randrange(2),
        adapter=client.asked.adapter,
    )


def random_move(rng: random.Random, simulation: Simulation) -> None:
    move = rng.random()
    if move < 0.15:
        random_add(rng, simulation)
    elif move < 0.19 and simulation.clients:
        simulation.abort(rng.choice(list(simulation.clients)))
    elif move < 0.21 and simulation.clients:
        first = simulation.clients[rng.choice(list(simulation.clients))].first_handle
        for handle, client in simulation.clients.items():
            if client.first_handle == first:
                simulation.abort(handle)
    elif move < 0.24:
        random_pin(rng, simulation)
    elif move < 0.25 and simulation.clients:
        simulation.unpin(rng.choice(list(simulation.clients)))
    elif move < 0.28:
        random_open(rng, simulation)
    elif move < 0.36:
        random_extend(rng, simulation)
    elif move < 0.365:
        simulation.lose_steps()
    elif move < 0.68:
        simulation.plan()
    else:
        simulation.apply()


def run_random(
    seed: int,
    num_moves: int,
    policy: str | None = None,
    *,
    has_states: bool = False,
    has_sources: bool = False,
) -> Simulation:
    rng = random.Random(seed)
    setup = random_setup(rng, policy)
    setup = with_states(rng, setup) if has_states else setup
    simulation = Simulation(with_sources(rng, setup) if has_sources else setup)
    with under_seed(seed):
        walk(rng, simulation, num_moves, returns=0.15 if has_sources or has_states else 0.0)
    return simulation


def walk(
    rng: random.Random, simulation: Simulation, num_moves: int, *, returns: float = 0.0
) -> None:
    """Move, run all requests to their ends, and check what they got. returns: share of moves after
    which a client comes back."""
    for _ in range(num_moves):
        random_move(rng, simulation)
        if returns and rng.random() < returns:
            random_return(rng, simulation)
    simulation.drain()

"""The laws over a fake hybrid model: layer groups of 16 and 48 tokens per block, and a recurrent
state. A state that misses a token, sees one twice or is another's becomes a wrong token."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from quire.protocol import FinishReason, StepPlan, StepResult
from quire.protocol.control import ResetPrefixCache, Sleep, UpdateWeights, Wake
from quire.protocol.recovery import ALWAYS_SWAP
from tests.engine.fake_engine import FakeEngine
from tests.kv_cache.model import make_layout
from tests.pairs import LAWS_BY_PAIRS
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
BREAKS = pytest.mark.parametrize("breaks", [False, True], ids=["once", "twice"])
LAYOUT = make_layout(((None, 1), (20, 3)), 16, has_states=True)


class Hybrid(FakeEngine):
    def __init__(self, **changes: object) -> None:
        self.plans: list[StepPlan] = []
        settings: dict[str, object] = {
            "layout": LAYOUT,
            "num_blocks": 80,
            "max_num_batched_tokens": 128,
            "max_model_len": 256,
            "num_checkpoints": 8,
        }
        super().__init__(**{**settings, **changes})  # pyright: ignore[reportArgumentType]
        execute = self.executor.execute

        def note(plan: StepPlan) -> Future[StepResult]:
            self.plans.append(plan)
            return execute(plan)

        self.executor.execute = note

    def check(self, prompts: dict[int, tuple[list[int], int, int]], max_tokens: int = 8) -> None:
        """prompts: prompt, seed and sample of each handle."""
        self.run()
        for handle, (prompt, seed, sample) in prompts.items():
            expected = self.model.expected_tokens(prompt, max_tokens, seed, sample)
            assert self.tokens[handle] == expected, f"sequence {handle}"


@DEPTHS
@BREAKS
@pytest.mark.parametrize("budget", [7, 50, 128])
def test_chunked_and_batched_is_alone(depth: int, breaks: bool, budget: int) -> None:
    engine = Hybrid(depth=depth, breaks=breaks, max_num_batched_tokens=budget)
    prompts = [[i, *range(i * 13)] for i in range(1, 9)]
    handles = [engine.add(prompt, seed=i)[0] for i, prompt in enumerate(prompts)]
    engine.check({h: (p, i, 0) for i, (h, p) in enumerate(zip(handles, prompts, strict=True))})


@DEPTHS
@BREAKS
def test_a_prefix_hit_starts_from_a_checkpoint(depth: int, breaks: bool) -> None:
    """Would catch a state that is found before it is saved, and one of another length: hits end
    where both groups have a whole block."""
    engine = Hybrid(depth=depth, breaks=breaks)
    shared = list(range(100))
    for suffix in ([1], [2, 3], [1, *range(60)]):
        (handle,) = engine.add([*shared, *suffix])
        engine.check({handle: ([*shared, *suffix], 0, 0)})
    assert engine.num_cached == {0: 0, 1: 96, 2: 96}


def test_a_prompt_stops_once_where_its_state_can_be_kept() -> None:
    engine = Hybrid(depth=1)
    engine.add(list(range(100)), max_tokens=1)
    engine.run()
    assert [plan.delta_tokens.tolist() for plan in engine.plans] == [[96], [4]]
    assert [len(plan.save_slot) for plan in engine.plans] == [1, 0]


@pytest.mark.parametrize("changes", [{"num_checkpoints": 0}, {"enable_prefix_caching": False}])
def test_a_prompt_is_not_cut_when_no_state_is_kept(changes: dict[str, object]) -> None:
    engine = Hybrid(depth=1, **changes)
    for _ in range(2):
        (handle,) = engine.add(list(range(100)), max_tokens=1)
        engine.check({handle: (list(range(100)), 0, 0)}, max_tokens=1)
    assert [plan.delta_tokens.tolist() for plan in engine.plans] == [[100], [100]]
    assert engine.num_cached == {0: 0, 1: 0}


@DEPTHS
@BREAKS
@pytest.mark.parametrize("num_checkpoints", [1, 8])
def test_preempted_is_not(depth: int, breaks: bool, num_checkpoints: int) -> None:
    engine = Hybrid(depth=depth, breaks=breaks, num_blocks=20, num_checkpoints=num_checkpoints)
    prompts = [[i] * 50 for i in range(6)]
    handles = [engine.add(prompt, max_tokens=60, seed=i)[0] for i, prompt in enumerate(prompts)]
    engine.check(
        {h: (p, i, 0) for i, (h, p) in enumerate(zip(handles, prompts, strict=True))}, max_tokens=60
    )
    assert engine.core.stats().preempted_total > 0
    if num_checkpoints == 8:
        resumed = [row for plan in engine.plans for row in plan.enter if row.checkpoint is not None]
        assert resumed, "nobody that was preempted started from a checkpoint"


@DEPTHS
@BREAKS
@pytest.mark.parametrize("prompt_len", [1, 48, 55, 96])
def test_forked_is_copied(depth: int, breaks: bool, prompt_len: int) -> None:
    """Also where the step after which samples branch off is one that saves the state."""
    engine = Hybrid(depth=depth, breaks=breaks)
    prompt = list(range(prompt_len))
    handles = engine.add(prompt, n=5, max_tokens=20, seed=5)
    engine.check({h: (prompt, 5, sample) for sample, h in enumerate(handles)}, max_tokens=20)


@DEPTHS
@BREAKS
def test_a_plan_may_replace_the_checkpoint_that_it_loads(depth: int, breaks: bool) -> None:
    """A conversation that grows, with one checkpoint for the state where its last turn ended."""
    engine = Hybrid(depth=depth, breaks=breaks, num_checkpoints=1, num_blocks=200)
    for length in (60, 150, 250):
        (handle,) = engine.add(list(range(length)), max_tokens=1)
        engine.check({handle: (list(range(length)), 0, 0)}, max_tokens=1)
    assert engine.num_cached == {0: 0, 1: 48, 2: 144}
    entering = [plan for plan in engine.plans if plan.enter][1:]
    assert [plan.enter[0].checkpoint for plan in entering] == [0, 0]
    assert [plan.save_checkpoint.tolist() for plan in entering] == [[0], [0]]


CHAT = make_layout(((None, 1),), 16, has_states=True)
SYSTEM = list(range(2, 152))
"""150 tokens: their state is kept after 144."""


def chat(**changes: object) -> Hybrid:
    return Hybrid(
        **{"layout": CHAT, "max_model_len": 512, "max_num_batched_tokens": 512, **changes}
    )


@DEPTHS
@BREAKS
def test_a_later_turn_starts_within_the_output_before_it(depth: int, breaks: bool) -> None:
    """Would catch a state of tokens that the engine did not know when it planned their step, under
    the name of others."""
    engine = chat(depth=depth, breaks=breaks)
    prompt, known = list(SYSTEM), 0
    for turn in range(4):
        (handle,) = engine.add([*prompt, 7 + turn], max_tokens=40)
        engine.check({handle: ([*prompt, 7 + turn], 0, 0)}, max_tokens=40)
        assert engine.num_cached[handle] == known
        prompt += [7 + turn, *engine.tokens[handle]]
        known = (len(prompt) - 1) // 16 * 16  # the last token is drawn and not computed
    assert engine.kv.states is not None
    assert engine.kv.states.num_used <= 6


@DEPTHS
@BREAKS
def test_other_conversations_start_behind_the_message_that_they_share(
    depth: int, breaks: bool
) -> None:
    engine = chat(depth=depth, breaks=breaks, num_checkpoints=16)
    asks = [[5, *range(70 + i)] for i in range(4)]
    for i, ask in enumerate([*asks, asks[0][:-1]]):
        prompt = [*SYSTEM, *ask]
        (handle,) = engine.add(prompt, message_ends=[len(SYSTEM), len(prompt) - 3])
        engine.check({handle: (prompt, 0, 0)})
        assert engine.num_cached[handle] >= 144 * (i > 0)


@DEPTHS
@BREAKS
def test_prompts_that_come_together_compute_what_they_share_once(depth: int, breaks: bool) -> None:
    engine = chat(depth=depth, breaks=breaks, num_checkpoints=16)
    prompts = [[*SYSTEM, *[200 + i] * 30] for i in range(4)]
    prompts += [[*range(400, 480), i] for i in range(2)]
    handles = [engine.add(prompt, message_ends=[len(SYSTEM)])[0] for prompt in prompts]
    engine.check({h: (p, 0, 0) for h, p in zip(handles, prompts, strict=True)})
    assert engine.num_cached == dict(zip(handles, [0, 144, 144, 144, 0, 80], strict=True))


@DEPTHS
def test_who_waits_for_a_state_goes_on_without_it(depth: int) -> None:
    """The one that computes it ends before."""
    for end in ("abort", "failure"):
        poison = 999
        engine = chat(depth=depth, poison=poison, max_num_batched_tokens=40)
        first = [*SYSTEM[:100], *([poison] if end == "failure" else []), *SYSTEM[100:], 5]
        second = [*first[:100], *range(60)]
        engine.add(first, message_ends=[96])
        (later,) = engine.add(second, message_ends=[96])
        engine.step()
        assert len(engine.plans[0].enter) == 1
        if end == "abort":
            engine.core.abort([0])
        engine.check({later: (second, 0, 0)})


@DEPTHS
def test_who_may_not_read_the_cache_waits_for_nobody(depth: int) -> None:
    engine = chat(depth=depth, max_num_batched_tokens=512)
    engine.add(SYSTEM, max_tokens=1)
    (pooled,) = engine.add(SYSTEM, pooling="mean")
    engine.step()
    assert [len(plan.enter) for plan in engine.plans][:1] == [2]
    engine.run()
    assert pooled in engine.vectors


@DEPTHS
def test_the_third_prompt_starts_where_two_before_it_branched_off(depth: int) -> None:
    engine = chat(depth=depth)
    cached: list[int] = []
    for i in range(4):
        prompt = [*range(3, 203), i, *range(70)]
        (handle,) = engine.add(prompt, max_tokens=1)
        engine.check({handle: (prompt, 0, 0)}, max_tokens=1)
        cached.append(engine.num_cached[handle])
    assert cached == [0, 0, 192, 192]


@DEPTHS
def test_a_state_that_many_start_from_outlives_ends_of_turns(depth: int) -> None:
    """Would fail if the least recently used went first: the long conversation alone keeps more
    states than there are checkpoints."""
    engine = chat(depth=depth, num_checkpoints=8, num_blocks=400, max_model_len=1024)

    def ask(prompt: list[int]) -> int:
        (handle,) = engine.add(prompt, message_ends=[len(SYSTEM)], max_tokens=20)
        engine.check({handle: (prompt, 0, 0)}, max_tokens=20)
        return handle

    for i in range(4):
        assert engine.num_cached[ask([*SYSTEM, *[200 + i] * 70])] == 144 * (i > 0)
    prompt = list(SYSTEM)
    for turn in range(5):
        prompt += [300 + turn] * 100
        prompt += engine.tokens[ask(prompt)]
    assert engine.num_cached[ask([*SYSTEM, 9])] == 144


@DEPTHS
@BREAKS
def test_who_is_preempted_goes_on_from_the_newest_state(depth: int, breaks: bool) -> None:
    engine = chat(depth=depth, breaks=breaks, num_blocks=26, num_checkpoints=16)
    prompts = [[i] * 40 for i in range(4)]
    handles = [
        engine.add(prompt, max_tokens=100, seed=i, message_ends=[33])[0]
        for i, prompt in enumerate(prompts)
    ]
    engine.check(
        {h: (p, i, 0) for i, (h, p) in enumerate(zip(handles, prompts, strict=True))},
        max_tokens=100,
    )
    assert engine.core.stats().preempted_total > 0
    entered = [row for plan in engine.plans for row in plan.enter if row.checkpoint is not None]
    assert any(row.num_computed_tokens > 40 for row in entered), "nobody kept a part of its output"


@DEPTHS
@BREAKS
def test_samples_keep_states_of_their_own(depth: int, breaks: bool) -> None:
    engine = chat(depth=depth, breaks=breaks, num_checkpoints=16)
    prompt = [*SYSTEM, 9]
    handles = engine.add(prompt, n=3, max_tokens=40, seed=5, message_ends=[len(SYSTEM)])
    engine.check({h: (prompt, 5, sample) for sample, h in enumerate(handles)}, max_tokens=40)
    for sample in range(3):
        later = [*prompt, *engine.tokens[handles[sample]], 3]
        (handle,) = engine.add(later)
        engine.check({handle: (later, 0, 0)})
        assert engine.num_cached[handle] == 190 // 16 * 16


@DEPTHS
def test_who_is_aborted_leaves_no_checkpoint_without_a_name(depth: int) -> None:
    engine = chat(depth=depth, num_checkpoints=2)
    for count in range(1, 40):
        (handle,) = engine.add(SYSTEM, max_tokens=60, seed=count)
        for _ in range(count):
            engine.step()
        engine.core.abort([handle])
        engine.run()
        assert not engine.kv.slots_with_unnamed_states
    (handle,) = engine.add(SYSTEM)
    engine.check({handle: (SYSTEM, 0, 0)})
    assert engine.num_cached[handle] == 144


@DEPTHS
def test_the_state_of_a_failed_row_is_not_kept(depth: int) -> None:
    engine = Hybrid(depth=depth, poison=999)
    bad = [*range(40), 999, *range(20)]  # within the first 48 tokens
    for prompt in (bad, bad):
        (handle,) = engine.add(prompt)
        engine.run()
        assert engine.finished[handle].reason is FinishReason.ERROR
        assert engine.kv.states is not None
        assert engine.kv.states.num_used == 0


@pytest.mark.parametrize(
    "ops", [(ResetPrefixCache(False),), (Sleep(1), Wake()), (UpdateWeights({}),)]
)
def test_states_go_with_the_cached_blocks(ops: tuple) -> None:
    engine = Hybrid()
    prompt = list(range(100))
    for turn in range(2):
        (handle,) = engine.add(prompt)
        engine.check({handle: (prompt, 0, 0)})
        assert engine.num_cached[handle] == 0, f"turn {turn}"
        for op in ops:
            engine.core.control(op, engine.now)
        assert engine.kv.states is not None
        assert engine.kv.states.num_used == 0


@DEPTHS
def test_a_state_that_a_lost_step_should_have_kept_is_not_found(depth: int) -> None:
    simulation = Simulation(Setup(depth=depth, num_checkpoints=4, max_num_batched_tokens=16))
    prompt = list(range(9))
    simulation.add(prompt)
    simulation.plan()
    simulation.lose_steps()
    for _ in range(2):
        simulation.add(prompt)
        simulation.drain()
    assert simulation.done["states_loaded"] == 1


@DEPTHS
@BREAKS
@pytest.mark.parametrize("num_checkpoints", [0, 1, 2, 12])
def test_swapped_sequences_go_on_from_their_states(
    depth: int, breaks: bool, num_checkpoints: int
) -> None:
    """Turns red when a state is kept in a checkpoint that an entering row still has to load, or one
    of another tenant of the slot. Where all checkpoints are taken, groups are computed again."""
    setup = Setup(
        depth=depth, num_blocks=14, num_host_blocks=100, max_num_seqs=6, breaks=float(breaks),
        recovery_costs=ALWAYS_SWAP, num_checkpoints=num_checkpoints, ticket_steps=(0, 2, 1),
    )  # fmt: skip
    simulation = Simulation(setup)
    for i in range(6):
        simulation.add([i] * 5, max_tokens=14, n=2 if i == 3 else 1)
    simulation.drain()
    assert simulation.scheduler.stats().preempted_total > 0
    assert (simulation.done["blocks_swapped_out"] > 0) == (num_checkpoints > 0)


GUESSES = pytest.mark.parametrize("guesses", ["any", "wrong", "right", "methods", "model"])


@DEPTHS
@GUESSES
@pytest.mark.parametrize("breaks", [0.0, 1.0], ids=["once", "twice"])
def test_drafts_leave_the_state_of_the_last_accepted_token(
    depth: int, guesses: str, breaks: float
) -> None:
    """The simulation compares all tokens with those of the model alone."""
    simulation = Simulation(
        Setup(depth=depth, max_drafts=3, guesses=guesses, num_checkpoints=4, breaks=breaks)
    )
    for i in range(3):
        simulation.add([1, 2, 3 + i], max_tokens=20)
    simulation.drain()
    if guesses != "methods":  # which may find that none pays
        assert simulation.done["drafts"] > 0
    if guesses in ("any", "right", "model"):
        assert simulation.done["accepted"] > 0


@DEPTHS
@pytest.mark.parametrize("guesses", ["any", "wrong", "right"])
def test_states_within_accepted_drafts_are_kept_under_their_names(depth: int, guesses: str) -> None:
    """Would catch a checkpoint that no step wrote, since its drafts were not accepted, and one
    behind drafts that were. The next turn starts from the last one."""
    setup = Setup(
        depth=depth, max_drafts=5, guesses=guesses, num_checkpoints=6, max_model_len=64,
        block_size=2, num_blocks=60, max_num_batched_tokens=16,
    )  # fmt: skip
    simulation = Simulation(setup)
    prompt, loaded = [1, 2, 3], 0
    for turn in range(4):
        (handle,) = simulation.add(prompt, max_tokens=11)
        simulation.drain()
        loaded += turn > 0
        assert simulation.done["states_loaded"] == loaded, f"turn {turn} starts from nothing"
        assert not simulation.kv.slots_with_unnamed_states
        prompt = [*prompt, *simulation.clients[handle].tokens, turn]
    assert simulation.done["drafts"] > 0


@DEPTHS
@BREAKS
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_pinned_state_outlives_a_flood(depth: int, breaks: bool, is_shared: bool) -> None:
    """Its blocks alone would be of no use: nobody could start from them when the state is gone."""
    engine = chat(depth=depth, breaks=breaks, num_checkpoints=4)
    (pin,) = engine.add(SYSTEM, max_tokens=1, pin_seconds=1e9, pin_is_shared=is_shared)
    engine.run()
    for i in range(8):
        (handle,) = engine.add([200 + i, *range(200)])
        engine.check({handle: ([200 + i, *range(200)], 0, 0)})
    for salt in ("", "other"):
        prompt = [*SYSTEM, 9, 8]
        (handle,) = engine.add(prompt, salt=salt)
        engine.check({handle: (prompt, 0, 0)})
        assert engine.num_cached[handle] == 144 * (is_shared or not salt)
    pins = engine.core._scheduler.state.pins  # pyright: ignore[reportPrivateUsage]
    assert [each.hits for each in pins.list(engine.now)] == [2 if is_shared else 1]
    assert pins.release(pin)
    engine.core.check_invariants()


@DEPTHS
def test_a_pin_ends_with_the_state_where_others_go_on(depth: int) -> None:
    """Also if it begins with a prefix that is cached up to close before its end; and a request that
    says no more than the pin goes on from an earlier state."""
    engine = chat(depth=depth, num_checkpoints=8)
    for length in (144, 160, 170):
        (handle,) = engine.add([*SYSTEM, *range(20)][:length], max_tokens=1, pin_seconds=1e9)
        engine.run()
        assert engine.finished[handle].reason is FinishReason.LENGTH
    for length, cached in ((145, 144), (161, 160), (171, 160), (160, 144)):
        prompt = [*SYSTEM, *range(30)][:length]
        (handle,) = engine.add(prompt)
        engine.check({handle: (prompt, 0, 0)})
        assert engine.num_cached[handle] == cached


def test_a_reset_leaves_pinned_states() -> None:
    engine = chat(num_checkpoints=4)
    engine.add(SYSTEM, max_tokens=1, pin_seconds=1e9)
    engine.run()
    engine.core.control(ResetPrefixCache(False), engine.now)
    (handle,) = engine.add([*SYSTEM, 9])
    engine.check({handle: ([*SYSTEM, 9], 0, 0)})
    assert engine.num_cached[handle] == 144
    engine.core.check_invariants()


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_pin_holds_the_state_of_another_pin(is_reset: bool) -> None:
    """Fault: the state has the name of another tenant, or none, so that the second pin fails as
    often as it is asked for."""
    engine = chat(num_checkpoints=8)
    (first,) = engine.add(SYSTEM, max_tokens=1, pin_seconds=1e9, pin_is_shared=True)
    engine.run()
    if is_reset:
        engine.core.control(ResetPrefixCache(False), engine.now)
    (second,) = engine.add([*SYSTEM, 9], max_tokens=1, pin_seconds=1e9, salt="other")
    engine.run()
    assert engine.finished[second].reason is FinishReason.LENGTH, engine.finished[second].message
    pins = engine.core._scheduler.state.pins  # pyright: ignore[reportPrivateUsage]
    assert pins.release(first)
    (handle,) = engine.add([*SYSTEM, 9, 8], salt="other")
    engine.check({handle: ([*SYSTEM, 9, 8], 0, 0)})
    assert engine.num_cached[handle] == 144
    engine.core.check_invariants()

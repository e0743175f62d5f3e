"""Promises of each policy: its order, its bound on waiting, and the laws of the scheduler."""

from __future__ import annotations

import asyncio
import math
import sys

import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test

from quire.base.errors import ConfigError, RequestError
from quire.base.platform.interrupts import held
from quire.config.resolved import ResolvedScheduler
from quire.config.settings import SCHEDULING_POLICIES
from quire.plan.scheduler import KeyedPolicy, PrefillLimits, SequenceGroup, make_policy
from quire.protocol import SchedulingParams
from tests.profiles import machine_settings, seeds
from tests.scheduler.random_moves import run_random
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation
from tests.scheduler.test_machine import SchedulerMachine

ROOMY = Setup(depth=1, block_size=4, num_blocks=400, max_num_batched_tokens=8, max_model_len=200)
ONE_SLOT = Setup(depth=1, num_blocks=100, max_num_seqs=1, max_num_batched_tokens=16)


def simulate(setup: Setup, policy: str, **changes) -> Simulation:
    return Simulation(Setup(**{**vars(setup), "policy": policy, **changes}))


def named(policy: str) -> ResolvedScheduler:
    return ResolvedScheduler(max_num_seqs=8, max_num_batched_tokens=8, scheduling_policy=policy)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 30 for i in range(length)]


def step(simulation: Simulation) -> None:
    simulation.plan()
    simulation.apply()


def order_of_first_tokens(simulation: Simulation) -> list[int]:
    """Handles, by the step of the first token; then everything is checked."""
    seen: dict[int, int] = {}
    while simulation.scheduler.has_unfinished:
        step(simulation)
        for handle, client in simulation.clients.items():
            if client.tokens:
                seen.setdefault(handle, simulation.num_steps)
    simulation.drain()
    return sorted(seen, key=lambda handle: (seen[handle], handle))


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
class TestLaws:
    def test_every_client_gets_its_own_tokens(self, policy):
        class Machine(SchedulerMachine):
            POLICY = policy

        run_state_machine_as_test(Machine, settings=machine_settings(examples=12, steps=30))

    def test_random_traffic(self, policy):
        for seed in seeds(15, first=9000):
            run_random(seed, num_moves=100, policy=policy)


def first_token_under_load(policy: str, victim_length: int, **scheduling) -> int | None:
    """Steps until a request has its first token while short ones come faster than they can be
    computed: two prompts of four tokens for each step of eight; None if it has none in 250."""
    simulation = simulate(ROOMY, policy, max_num_seqs=8)
    flood = SchedulingParams(tenant="flood")
    simulation.add(prompt(4), max_tokens=1, scheduling=flood)
    victim = simulation.add(
        prompt(victim_length, 3), max_tokens=1, scheduling=SchedulingParams(**scheduling)
    )[0]
    for i in range(250):
        for j in range(3):
            simulation.add(prompt(4, i + 5 * j), max_tokens=1, scheduling=flood, lateness=j)
        step(simulation)
        if simulation.clients[victim].tokens:
            return i
    return None


@pytest.mark.parametrize(
    ("policy", "scheduling", "bound"),
    [
        ("fcfs", {}, 20),
        ("priority", {"priority": 3}, 60),
        ("two_level", {}, 100),
        ("two_level", {"priority": 3}, 140),
        ("fair", {"tenant": "victim", "weight": 0.5}, 60),
    ],
)
def test_nothing_starves(policy, scheduling, bound):
    steps = first_token_under_load(policy, victim_length=100, **scheduling)
    assert steps is not None
    assert steps <= bound


def test_srtf_starves_a_long_prompt_as_its_docstring_says():
    assert first_token_under_load("srtf", victim_length=100) is None


class TestHeadOfLineBlocking:
    """A long prompt is under way when a short one comes."""

    def short_before_long(self, policy: str, **limits) -> bool:
        simulation = simulate(ROOMY, policy, prefill_limits=PrefillLimits(**limits))
        long = simulation.add(prompt(150), max_tokens=2)[0]
        step(simulation)
        short = simulation.add(prompt(6, 4), max_tokens=2)[0]
        return order_of_first_tokens(simulation) == [short, long]

    @pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
    def test_is_there(self, policy):
        assert not self.short_before_long(policy)

    @pytest.mark.parametrize("policy", ["srtf", "two_level"])
    def test_is_gone_by_policy(self, policy):
        assert self.short_before_long(policy)

    @pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
    def test_is_gone_by_threshold(self, policy):
        assert self.short_before_long(policy, long_prefill_token_threshold=2)


class TestPriority:
    def test_smaller_first_and_ties_by_arrival(self):
        simulation = simulate(ONE_SLOT, "priority")
        for priority in (0, 5, -1, 0):
            simulation.add(
                prompt(5, priority), scheduling=SchedulingParams(priority=priority), lateness=0
            )
        assert order_of_first_tokens(simulation) == [2, 0, 3, 1]

    @pytest.mark.parametrize(("head_start", "first"), [(3.0, 1), (5.0, 0)])
    def test_a_level_is_worth_its_seconds(self, head_start, first):
        """Ageing is 4 s per level in simulations."""
        simulation = simulate(ONE_SLOT, "priority")
        simulation.now = 100.0
        simulation.add(prompt(5), scheduling=SchedulingParams(priority=1))
        simulation.now += head_start - 1.0  # `add` lets a second pass
        simulation.add(prompt(5, 2), scheduling=SchedulingParams(priority=0))
        assert order_of_first_tokens(simulation)[0] == first

    @pytest.mark.parametrize("policy", ["fcfs", "srtf", "fair"])
    def test_is_refused_where_nobody_looks_at_it(self, policy):
        simulation = simulate(ONE_SLOT, policy)
        assert simulation.add(prompt(3), scheduling=SchedulingParams(priority=1)) == []
        assert simulation.num_refused == 1

    @pytest.mark.parametrize("value", [True, 1.5, "1", 2**40])
    def test_is_an_integer(self, value):
        with pytest.raises(RequestError, match="priority is"):
            SchedulingParams(priority=value)


class TestTwoLevel:
    """The staging queue holds 3 in simulations."""

    def test_shortest_first_within_a_batch_only(self):
        simulation = simulate(ONE_SLOT, "two_level")
        for length in (12, 9, 14, 2, 1):
            simulation.add(prompt(length, length), max_tokens=2)
        assert order_of_first_tokens(simulation) == [1, 0, 2, 4, 3]

    def test_cache_is_asked_again_before_each_choice(self):
        """The longest prompt shares all but its end with the first that is served."""
        simulation = simulate(ONE_SLOT, "two_level")
        simulation.add(prompt(8), max_tokens=2)
        simulation.add(prompt(9, 11), max_tokens=2)
        simulation.add([*prompt(8), 1, 2, 3], max_tokens=2)
        assert order_of_first_tokens(simulation) == [0, 2, 1]

    def test_cache_is_not_asked_for_those_behind(self):
        asked: list[int] = []
        simulation = simulate(ONE_SLOT, "two_level")
        for _ in range(20):
            simulation.add(prompt(5), max_tokens=2)

        def num_uncached(group: SequenceGroup) -> int:
            asked.append(group.number)
            return 1

        simulation.policy.first(lambda _: True, num_uncached)
        assert asked == [0, 1, 2]


class TestFair:
    def served(self, weights: dict[str, float], num_steps: int) -> dict[str, int]:
        """Output tokens by tenant; each keeps more waiting than can be served. Without a prefix
        cache, so that requests that are alike cost alike."""
        simulation = simulate(ONE_SLOT, "fair", max_num_seqs=2, enable_prefix_caching=False)
        owner: dict[int, str] = {}
        for i in range(60):
            for tenant, weight in weights.items():
                asked = SchedulingParams(tenant=tenant, weight=weight)
                handles = simulation.add(prompt(4, i), max_tokens=4, scheduling=asked)
                owner |= dict.fromkeys(handles, tenant)
        for _ in range(num_steps):
            step(simulation)
        counts = dict.fromkeys(weights, 0)
        for handle, client in simulation.clients.items():
            counts[owner[handle]] += len(client.tokens)
        return counts

    def test_equal_weights_get_equal_shares(self):
        counts = self.served({"a": 1.0, "b": 1.0}, num_steps=60)
        assert abs(counts["a"] - counts["b"]) <= 8

    def test_shares_follow_weights(self):
        counts = self.served({"a": 1.0, "b": 3.0}, num_steps=100)
        assert counts["b"] / counts["a"] == pytest.approx(3.0, rel=0.2)

    def test_silence_earns_no_credit(self):
        """A tenant that comes late shares from then on; it does not catch up."""
        simulation = simulate(ONE_SLOT, "fair")
        for i in range(40):
            simulation.add(prompt(4, i), max_tokens=4, scheduling=SchedulingParams(tenant="old"))
        for _ in range(60):
            step(simulation)
        late = [
            simulation.add(prompt(4, i), max_tokens=4, scheduling=SchedulingParams(tenant="new"))[0]
            for i in range(20)
        ]
        before = sum(len(client.tokens) for client in simulation.clients.values())
        for _ in range(60):
            step(simulation)
        after = sum(len(client.tokens) for client in simulation.clients.values())
        new = sum(len(simulation.clients[handle].tokens) for handle in late)
        assert new == pytest.approx((after - before) / 2, abs=8)

    @pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), "1"])
    def test_weight_is_above_zero(self, value):
        with pytest.raises(RequestError, match="weight is"):
            SchedulingParams(weight=value)


class TestPrefillLimits:
    def test_threshold_caps_a_prompt_per_step(self):
        limits = PrefillLimits(long_prefill_token_threshold=3)
        simulation = simulate(ROOMY, "fcfs", prefill_limits=limits)
        simulation.add(prompt(11), max_tokens=1)
        steps: list[int] = []
        while simulation.scheduler.has_unfinished:
            simulation.plan()
            steps.append(int(simulation.standing.max()))
            simulation.apply()
        assert steps == [3, 3, 3, 2]

    def begun_after_a_step(self, **limits) -> list[int]:
        """Handles of prompts of 20, 20, 20 and 4 tokens that have begun after one step of 32, of
        which each may have 6."""
        limits = PrefillLimits(long_prefill_token_threshold=6, **limits)
        simulation = simulate(
            ROOMY, "fcfs", prefill_limits=limits, max_num_seqs=8, max_num_batched_tokens=32
        )
        for i, length in enumerate((20, 20, 20, 4)):
            simulation.add(prompt(length, i), max_tokens=1)
        simulation.plan()
        begun = sorted(simulation.scheduler.running_handles().tolist())
        simulation.drain()
        return begun

    def test_without_limits_all_begin(self):
        assert self.begun_after_a_step() == [0, 1, 2, 3]

    def test_partial_prompts_are_bounded_and_whole_ones_pass_by(self):
        assert self.begun_after_a_step(max_num_partial_prefills=2) == [0, 1, 3]

    def test_long_prompts_are_bounded(self):
        assert self.begun_after_a_step(max_long_partial_prefills=1) == [0, 3]


class ShortOutputsFirst(KeyedPolicy):
    """A policy that a user may write."""

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        return (float(group.max_total_tokens), group.number)


class NotAPolicy:
    pass


def leave():
    sys.exit("no licence")


BROKEN: dict[str, object] = {}
"""Errors that methods of `Broken` raise, by name; under "given" the key that it returns."""


class Broken(KeyedPolicy):
    """Fails for prompts of length 7, or always where it is not told of groups."""

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        if len(group.request.prompt_token_ids) == 7:
            self._fail("key")
            return BROKEN.get("given", (0.0, group.number))
        return (float(-group.number), group.number)  # the newest first

    def _fail(self, name):
        if isinstance(error := BROKEN.get(name), BaseException):
            raise error

    def remove(self, group):
        self._fail("remove")
        super().remove(group)

    def first(self, may_start, num_uncached):
        self._fail("first")
        return super().first(may_start, num_uncached)

    def count_tokens(self, accounts, tokens):
        self._fail("count_tokens")


class TestOwnPolicy:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("key", ValueError("no")),
            ("key", SystemExit(3)),
            ("first", KeyboardInterrupt()),
            ("remove", GeneratorExit()),
            ("count_tokens", asyncio.CancelledError()),
            ("given", "soon"),
            ("given", (math.nan, 3)),
        ],
    )
    def test_one_that_fails_costs_no_request(self, name, value, monkeypatch, caplog):
        """Turns red when it ends the engine, or a request that it fails for is never served."""
        monkeypatch.setattr(f"{__name__}.BROKEN", {name: value})
        simulation = simulate(ONE_SLOT, f"{__name__}:Broken")
        for length in (5, 7, 6):
            simulation.add(prompt(length), max_tokens=4)
        with held():  # as the engine does
            order = order_of_first_tokens(simulation)
        assert sorted(order) == [0, 1, 2]
        if name in ("key", "given", "count_tokens"):  # the others go as the policy says
            assert order.index(2) < order.index(0)
        (record,) = [each for each in caplog.records if "scheduling_policy" in each.message]
        assert "Broken" in record.message

    @pytest.mark.usefixtures("pythons_own_handler")
    def test_ctrl_c_while_one_is_asked_is_no_fault_of_it(self, monkeypatch):
        monkeypatch.setattr(f"{__name__}.BROKEN", {"first": KeyboardInterrupt()})
        simulation = simulate(ONE_SLOT, f"{__name__}:Broken")
        simulation.add(prompt(5), max_tokens=4)
        with pytest.raises(KeyboardInterrupt):
            simulation.plan()

    def test_is_used(self):
        simulation = simulate(ONE_SLOT, f"{__name__}:ShortOutputsFirst")
        for max_tokens in (9, 3, 6):
            simulation.add(prompt(5), max_tokens=max_tokens)
        assert order_of_first_tokens(simulation) == [1, 2, 0]

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("no_such_module:Class", "ModuleNotFoundError"),
            (f"{__name__}:NoSuchClass", "AttributeError"),
            (f"{__name__}:NotAPolicy", "is no Policy"),
            (f"{__name__}:KeyedPolicy", "TypeError"),
            (f"{__name__}:leave", "SystemExit: no licence"),
        ],
    )
    def test_what_cannot_be_used_is_said(self, name, why):
        with pytest.raises(ConfigError, match=f"{why}.*fcfs, priority, srtf, two_level, fair"):
            make_policy(named(name))


def test_every_name_has_a_policy():
    for name in SCHEDULING_POLICIES:
        assert len(make_policy(named(name))) == 0


def test_accounts_grow_with_tenants():
    simulation = simulate(ONE_SLOT, "fair")
    for i in range(40):
        asked = SchedulingParams(tenant=str(i), weight=1.0 + i % 3)
        simulation.add(prompt(3, i), max_tokens=2, scheduling=asked)
    assert sorted(order_of_first_tokens(simulation)) == list(range(40))
    assert np.all(simulation.policy._counters[:40] > 0)

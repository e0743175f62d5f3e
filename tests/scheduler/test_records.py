"""Records of requests: waits add up, steps and chunks are counted, preemptions tell their cost."""

from __future__ import annotations

from quire.plan.kv_cache.pool import MAX_EVICTED_NAMES, BlockPool
from quire.plan.scheduler.readings.records import MAX_CHUNKS, MAX_ENDED, MAX_PREEMPTIONS
from quire.protocol.control import Pause, Resume, TellFacts
from quire.protocol.status import PreemptionCause, PromptChunk, RequestFacts
from tests.engine.fake_engine import FakeEngine


def facts(engine: FakeEngine, *names: str) -> list[RequestFacts]:
    return list(engine.core.control(TellFacts("", names), engine.now).facts)


def prompt(number: int, length: int = 14) -> list[int]:
    return list(range(100 * number + 1, 100 * number + 1 + length))


def test_waits_add_up_to_the_time_before_the_first_step() -> None:
    """Fault: time is counted twice, or under no reason. A step takes a second here."""
    engine = FakeEngine(max_num_seqs=1, depth=1)
    engine.add(prompt(0), max_tokens=5)
    engine.add(prompt(1), max_tokens=5)
    engine.step()
    (waiting,) = facts(engine, "1")
    assert waiting.state == "waiting" and waiting.cache is None
    engine.run()
    first, second = facts(engine, "0", "1")
    assert first.waits == {"step": 1.0} and first.behind == ()
    assert [other.request_id for other in second.behind] == ["0"]
    assert sum(second.waits.values()) == 1.0 + 5.0  # each step of the first, and until it began
    assert second.waits["places"] == 5.0


def test_waits_begin_when_a_request_arrives() -> None:
    """Fault: the part of a step that was over is counted, since others waited through all of it."""
    engine = FakeEngine(max_num_seqs=1, depth=1)
    engine.add(prompt(0), max_tokens=5)
    engine.add(prompt(1), max_tokens=5)
    engine.step()
    engine.now += 0.75
    engine.add(prompt(2), max_tokens=5)
    (found,) = facts(engine, "2")
    assert found.waits == {}
    engine.step()
    engine.step()
    (found,) = facts(engine, "2")
    assert found.waits == {"places": found.age_s} and found.age_s == 2.0


def test_a_clock_that_stood_counts_nothing() -> None:
    """Fault: an idle engine's time is laid to a request that came later."""
    engine = FakeEngine(depth=1)
    engine.add(prompt(0), max_tokens=3)
    engine.run()
    engine.now += 1000.0
    engine.add(prompt(1), max_tokens=3)
    engine.run()
    (found,) = facts(engine, "1")
    assert found.waits == {"step": 1.0}


def test_a_pause_is_a_reason() -> None:
    """Fault: the time of a pause is laid to a step under way, or to what others waited for."""
    engine = FakeEngine(max_num_seqs=1, depth=1)
    engine.add(prompt(0), max_tokens=3)
    engine.run()
    engine.core.control(Pause("keep"), engine.now)
    engine.now += 10.0
    engine.add(prompt(1), max_tokens=3)
    engine.now += 20.0
    assert facts(engine, "1")[0].waits == {"held": 20.0}
    engine.core.control(Resume(), engine.now)
    engine.run()
    assert facts(engine, "1")[0].waits["held"] == 20.0


def test_samples_and_beside() -> None:
    """Fault: samples are counted as steps, or a row as its own neighbour."""
    engine = FakeEngine()
    engine.add(prompt(0, 3), max_tokens=6, n=3)
    engine.run()
    (found,) = facts(engine, "0")
    assert (found.num_chunks, found.num_chunk_tokens, found.chunk_rows) == (1, 3, (0, 0))
    assert found.chunks == (PromptChunk(1.0, 3, 0),)
    assert (found.num_steps, found.step_rows) == (5, (2, 2))


def test_a_preempted_request_goes_on_counting() -> None:
    """Fault: steps before a preemption are lost, or the prompt computed again counts as chunks."""
    engine = FakeEngine(num_blocks=12, max_num_batched_tokens=16)
    for number in range(3):
        engine.add(prompt(number), max_tokens=12)
    engine.run()
    found = facts(engine, "0", "1", "2")
    assert sum(each.num_preemptions for each in found) > 0
    for each in found:
        assert each.num_chunk_tokens == 14 and each.num_steps >= 10
        for one in each.preemptions:
            assert one.cause is PreemptionCause.BLOCKS and one.seconds is not None
            assert one.num_again is not None and 0 <= one.num_again <= one.num_computed
            assert 0.0 < one.at_s < one.at_s + one.seconds <= each.age_s


def test_chunks_have_their_times() -> None:
    """Fault: a chunk has the time of another one, or tokens of the rows beside it."""
    engine = FakeEngine(depth=1, max_num_batched_tokens=8)
    engine.add(prompt(0, 3), max_tokens=20)
    engine.step()
    engine.now += 10.0
    engine.add(prompt(1, 20), max_tokens=2)
    engine.run()
    (found,) = facts(engine, "1")
    assert [(each.at_s, each.num_tokens, each.num_rows) for each in found.chunks] == [
        (1.0, 7, 1), (2.0, 7, 1), (3.0, 6, 1),
    ]  # fmt: skip


def test_swapped_tokens_are_not_computed_again() -> None:
    engine = FakeEngine(num_blocks=12, max_num_batched_tokens=16, num_host_blocks=32)
    for number in range(3):
        engine.add(prompt(number), max_tokens=12)
    engine.run()
    lost = [one for each in facts(engine, "0", "1", "2") for one in each.preemptions]
    assert lost
    for one in lost:
        assert one.num_swapped > 0 and one.num_again == one.num_computed - one.num_swapped


def test_an_aborted_request_is_remembered() -> None:
    """Fault: a client that gave up cannot ask why."""
    engine = FakeEngine(max_num_seqs=1)
    engine.add(prompt(0), max_tokens=20)
    handles = engine.add(prompt(1), max_tokens=5)
    for _ in range(4):
        engine.step()
    engine.core.abort(handles)
    engine.run()
    (found,) = facts(engine, "1")
    assert found.state == "finished" and found.waits["places"] > 1.0


def test_records_are_bounded() -> None:
    engine = FakeEngine(num_blocks=4, max_num_batched_tokens=8)
    for _ in range(MAX_ENDED + 5):
        engine.add([1, 2, 3], max_tokens=1)
        engine.run()
    assert not facts(engine, "4") and facts(engine, "5")
    record = engine.scheduler.state.records._ended[-1]
    for _ in range(MAX_CHUNKS + 3):
        record.count_chunk(1, 0, 0.0)
    assert record.num_chunks == MAX_CHUNKS + 4
    assert len(record.chunks) == MAX_CHUNKS
    for _ in range(MAX_PREEMPTIONS + 3):
        record.preempt(PreemptionCause.RESET, None, num_computed=1, num_swapped=0, now=0.0)
        record.come_back(0, 1.0)
    assert record.num_preemptions == MAX_PREEMPTIONS + 3
    assert len(record.preemptions) == MAX_PREEMPTIONS


def test_names_of_evicted_blocks_are_bounded() -> None:
    """Fault: names pile up, or are forgotten at once."""
    pool = BlockPool(1, 1)
    for number in range(3 * MAX_EVICTED_NAMES):
        block = pool.allocate()
        pool.publish(block, 0, number.to_bytes(16))
        pool.release(block)
    assert sum(len(names) for names in pool._evicted_names) <= 2 * MAX_EVICTED_NAMES + 1
    last = 3 * MAX_EVICTED_NAMES - 2
    assert pool.was_evicted((0, last.to_bytes(16))) and not pool.was_evicted((0, bytes(16)))
    pool.drop_cached()
    assert not pool.was_evicted((0, last.to_bytes(16)))

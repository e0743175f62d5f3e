"""Capturing a computation's kernel calls, and the memory in which it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, REFERENCE, OpSet, Team, build_op_set
from quire.ops.native.capture import CaptureArena, capture_sizes, record_calls, replay_list
from quire.ops.native.replay import NotCapturableError, ReplayList

TEAM = Team(1)
OPS = build_op_set(detect_platform(), team=TEAM)
needs_kernels = pytest.mark.skipif(
    OPS.chosen["linear"] == REFERENCE, reason="no C++ kernels on this machine"
)


@dataclass
class Captured:
    calls: ReplayList
    result: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.calls.run()
        return self.result


def capture(team: Team, arena: CaptureArena, compute: Callable[[], torch.Tensor]) -> Captured:
    with record_calls(team, arena) as calls:
        result = arena.borrowed(compute())
    return Captured(replay_list(calls), result)


class Block:
    """Two norms and a matrix product of one input that stays where it is."""

    def __init__(self, ops: OpSet) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(3, 64, generator=generator)
        self.weight = torch.randn(64, generator=generator)
        self.matrix = ops.linear(torch.randn(96, 64, generator=generator))
        self._ops = ops

    def __call__(self) -> torch.Tensor:
        normed = self._ops.rms_norm(self.x.view(3, 2, 32), self.weight[:32], 1e-6)
        normed, _ = self._ops.add_rms_norm(normed.flatten(1), self.x, self.weight, 1e-6)
        return self.matrix(normed)


@needs_kernels
def test_a_replay_computes_from_what_the_inputs_hold_now() -> None:
    """Turns red when an argument is packed wrongly (a stride, a float, no residual)."""
    block, arena = Block(OPS), CaptureArena(1 << 16)
    captured = capture(TEAM, arena, block)
    assert len(captured.calls) == 3
    assert torch.equal(captured.replay(), block())
    block.x.neg_().mul_(3.0)
    expected = block()
    assert not torch.equal(captured.result, expected)
    assert torch.equal(captured.replay(), expected)


@needs_kernels
def test_what_is_captured_is_not_computed() -> None:
    """Turns red when rows take a token twice, in the capture and in its first replay."""
    block, arena = Block(OPS), CaptureArena(1 << 16)
    residual = torch.zeros(3, 64)

    def compute() -> torch.Tensor:
        _, total = OPS.add_rms_norm(block.x, residual, block.weight, 1e-6)
        return total

    before = block.x.clone(), residual.clone()
    captured = capture(TEAM, arena, compute)
    assert torch.equal(block.x, before[0])
    assert torch.equal(residual, before[1])
    assert torch.equal(captured.replay(), block.x)


@needs_kernels
def test_a_result_of_other_memory_is_refused() -> None:
    block = Block(OPS)
    with pytest.raises(NotCapturableError):
        capture(TEAM, CaptureArena(1 << 16), lambda: torch.from_numpy(block().numpy().copy()))


@needs_kernels
def test_two_captures_share_an_arena() -> None:
    """Turns red when what one keeps is lost to the next, or what it lends is not given back."""
    block, arena = Block(OPS), CaptureArena(1 << 12)
    captured = [capture(TEAM, arena, block) for _ in range(50)]
    for each in captured:
        assert torch.equal(each.replay(), block())


@needs_kernels
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda y: y + 1, "aten.add.Tensor"),
        (lambda y: y.relu_(), "aten.relu_"),
        (lambda y: y.double(), "aten._to_copy"),
        (lambda y: y * float(y.max()), "aten.max"),
        (lambda y: torch.ones(3), "aten.ones"),
        (lambda y: y.t().contiguous(), "aten"),
    ],
)
def test_what_a_replay_would_leave_out_is_refused(spoil: object, reason: str) -> None:
    block = Block(OPS)
    with pytest.raises(NotCapturableError, match=reason):
        capture(TEAM, CaptureArena(1 << 16), lambda: spoil(block()))  # type: ignore[operator]
    assert TEAM.recorded is None


@needs_kernels
def test_a_computation_without_kernels_or_without_room_is_refused() -> None:
    with pytest.raises(NotCapturableError, match="no kernels"):
        capture(TEAM, CaptureArena(1 << 16), lambda: torch.empty(3))
    with pytest.raises(NotCapturableError, match="more than 1024 bytes"):
        capture(TEAM, CaptureArena(1024), Block(OPS))


@needs_kernels
def test_a_failing_call_is_named() -> None:
    """Turns red when a replay goes on after a failure, or blames another kernel."""
    block, ids = Block(OPS), torch.tensor([5], dtype=torch.int32)
    captured = capture(TEAM, CaptureArena(1 << 16), lambda: block.matrix(block.matrix.rows(ids)))
    ids[0] = 96
    with pytest.raises(EngineError, match=r"kernel linear_rows failed with code 3"):
        captured.replay()
    ids[0] = 7
    assert torch.equal(captured.replay(), block.matrix(block.matrix.rows(ids)))


class Sized:
    """Norms and a product of the first rows of one input, and norms of the first ones of another
    that are added up in it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(10, 64, generator=generator)
        self.y = torch.randn(5, 64, generator=generator)
        self.weight = torch.randn(64, generator=generator)
        self.matrix = OPS.linear(torch.randn(96, 64, generator=generator))

    def __call__(self, num_x: int, num_y: int) -> torch.Tensor:
        x, y = self.x[:num_x], self.y[:num_y]
        normed = OPS.rms_norm(x.view(num_x, 2, 32), self.weight[:32], 1e-6).flatten(1)
        OPS.add(y, OPS.rms_norm(y, self.weight, 1e-6))
        normed, _ = OPS.add_rms_norm(normed, x, self.weight, 1e-6)
        return self.matrix(OPS.activation(normed, "gelu"))


LARGEST = (10, 5)


@needs_kernels
def test_one_capture_serves_all_sizes() -> None:
    """Turns red when a number that follows a size stays, or follows the other size; and when what
    is recorded is computed."""
    compute, arena = Sized(), CaptureArena(1 << 16)
    before = arena.empty(torch.empty(1 << 15, dtype=torch.uint8, device="meta")).fill_(7)
    whole = before[:]
    del before
    captured = capture_sizes(TEAM, arena, compute, LARGEST)
    assert bool((whole == 7).all())
    assert len(captured.calls) == 6
    for num_x in (10, 1, 4, 0, 8):
        for num_y in (1, 5, 0, 3):
            compute.x.neg_().add_(0.5)
            expected = compute(num_x, num_y)
            assert torch.equal(captured.replay(num_x, num_y)[:num_x], expected)


@needs_kernels
@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda s, x, y: s(x, y) if x > 1 else s.matrix(s.x[:1]), "other kernels"),
        (lambda s, x, y: s.matrix(s.x[: min(x, 5)]), "no multiple of a size"),
        (lambda s, x, y: s.matrix(s.x[10 - x :]), "no multiple of a size"),
        (lambda s, x, y: s.matrix(s.x[: max(1, x // 2)]), "no multiple of a size"),
        (lambda s, x, y: s.matrix(OPS.rms_norm(s.x[:5], s.weight, 0.1 * y)), "no multiple"),
        (lambda s, x, y: (torch.empty(10 // x), s(x, y))[1], "other buffers"),
        (lambda s, x, y: (torch.empty(3) if x > 1 else None, s(x, y))[1], "other buffers"),
        (lambda s, x, y: s(x, y)[x - 1 :], "lies elsewhere"),
        (lambda s, x, y: s(x, y) * 2.0, "aten.mul"),
    ],
)
def test_what_does_not_follow_the_sizes_is_refused(compute: object, reason: str) -> None:
    sized = Sized()
    with pytest.raises(NotCapturableError, match=reason):
        capture_sizes(
            TEAM,
            CaptureArena(1 << 16),
            lambda x, y: compute(sized, x, y),  # type: ignore[operator]
            LARGEST,
        )
    assert TEAM.recorded is None
    assert TEAM.computes


@needs_kernels
@pytest.mark.parametrize("largest", [(5, 5), (1, 5), (5, 1), (1, 1)])
def test_equal_sizes_and_sizes_of_one_are_told_apart(largest: tuple[int, int]) -> None:
    sized = Sized()
    captured = capture_sizes(TEAM, CaptureArena(1 << 16), sized, largest)
    for num_x in range(1, largest[0] + 1):
        for num_y in range(1, largest[1] + 1):
            expected = sized(num_x, num_y)
            assert torch.equal(captured.replay(num_x, num_y)[:num_x], expected)


@needs_kernels
def test_memory_that_was_given_back_is_there_again_for_a_replay() -> None:
    """Turns red when an engine that computes call by call keeps the memory of captured steps."""
    block, arena = Block(OPS), CaptureArena(1 << 16)
    captured = capture(TEAM, arena, block)
    assert captured.replay().any()
    arena.give_back()
    assert not captured.result.any()
    assert torch.equal(captured.replay(), block())


def test_references_are_refused() -> None:
    """With QUIRE_CPU_ISA=none nothing is captured."""
    ops = build_op_set(detect_platform(), dict.fromkeys(ALL_OPS, REFERENCE), TEAM)
    with pytest.raises(NotCapturableError):
        capture(TEAM, CaptureArena(1 << 16), Block(ops))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5)), max_size=40))
def test_buffers_that_live_do_not_touch(moves: list[tuple[int, int]]) -> None:
    """Each move takes a buffer and lets another go, of which a view may live on."""
    arena = CaptureArena(1 << 16)
    kept: dict[int, tuple[torch.Tensor, int]] = {}
    for number, (size, dropped) in enumerate(moves):
        tensor = arena.empty(torch.empty(size, dtype=torch.uint8, device="meta"))
        tensor.fill_(number)
        kept[number] = (tensor[size // 2 :], number)
        del tensor
        kept.pop(dropped, None)
        assert all(bool((view == value).all()) for view, value in kept.values())
        assert len(arena._in_use) == len(kept)

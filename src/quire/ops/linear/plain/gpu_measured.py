"""The provider `measured` of `linear`: products are timed on the GPU when a model loads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import median

import torch

from quire.base.platform import Platform
from quire.config import env
from quire.ops.linear.plain.choice_cache import ChoiceCache
from quire.ops.linear.plain.measured import MeasuredMatrix, ProductChooser
from quire.ops.linear.plain.vendor import VENDOR, load_vendor
from quire.ops.native.team import ALONE, Team
from quire.ops.operation import FOR_GPUS, Provider
from quire.ops.triton_provider import triton_unavailable

__all__ = ["MEASURED", "load_measured", "time_on_gpu"]

_REPEATS = 7


def load_measured(team: Team = ALONE) -> Callable[..., MeasuredMatrix]:
    """`linear` by the faster product; contract in `quire.ops.linear.plain`. Needs a GPU."""
    import triton

    from quire.ops.linear.plain.triton import num_processors
    from quire.ops.linear.plain.triton_product import multiply

    environment = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "toolkit": str(torch.version.cuda or torch.version.hip),
        "candidates": "1",  # increase it when tiles.candidates changes
    }
    slug = re.sub(r"\W+", "_", environment["gpu"]).strip("_").lower()
    cache = ChoiceCache(env.cache_folder() / f"linear_{slug}.json", environment)
    processors = num_processors(torch.device("cuda"))
    chooser = ProductChooser(time_on_gpu, multiply, cache, processors)
    pack = load_vendor(team)
    return lambda weight, bias=None: MeasuredMatrix(pack(weight, bias), chooser)


def time_on_gpu(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of all calls, in a CUDA graph to leave out launches from Python; the
    median of a few replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and lets libraries allocate their workspaces
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, capture_error_mode="thread_local"
    ):  # others may use the GPU meanwhile
        for call in calls:
            call()
    graph.replay()
    seconds: list[float] = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return median(seconds)


def _unavailable(platform: Platform) -> str | None:
    if platform.device == "cpu":
        return FOR_GPUS  # also in Triton's interpreter, which cannot be timed
    return VENDOR.unavailable(platform) or triton_unavailable(platform)


MEASURED = Provider("measured", _unavailable, load_measured)

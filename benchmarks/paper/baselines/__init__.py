"""The systems that the PagedAttention paper compares with, as its section 6.1 defines them."""

from benchmarks.paper.baselines.buddy import BuddyAllocator
from benchmarks.paper.baselines.faster_transformer import serve_faster_transformer
from benchmarks.paper.baselines.orca import RESERVATIONS, OrcaMemory, Reservation, serve_orca

__all__ = [
    "RESERVATIONS",
    "BuddyAllocator",
    "OrcaMemory",
    "Reservation",
    "serve_faster_transformer",
    "serve_orca",
]

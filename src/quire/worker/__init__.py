"""One process, one device."""

from quire.worker.worker import Worker, WorkerSettings

__all__ = ["Worker", "WorkerSettings"]

"""One process, one device."""

from quire.compute.worker.settings import WorkerSettings
from quire.compute.worker.worker import Worker

__all__ = ["Worker", "WorkerSettings"]

"""One process, one device."""

from quire.worker.settings import WorkerSettings
from quire.worker.worker import Worker

__all__ = ["Worker", "WorkerSettings"]

"""Executors of steps: in this process, or (for tests) a fake one without a model."""

from quire.compute.executor.base import Executor, StepFuture

__all__ = ["Executor", "StepFuture"]

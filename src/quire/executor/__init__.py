"""Where steps are computed: in this process, or (for tests) nowhere at all."""

from quire.executor.base import Executor, StepFuture

__all__ = ["Executor", "StepFuture"]

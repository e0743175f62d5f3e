"""Training on the log-probabilities that the engine samples with. Imports torch."""

from quire.training.policy import PolicyModel, sampled_log_probs
from quire.training.reference import ReferenceModel

__all__ = ["PolicyModel", "ReferenceModel", "sampled_log_probs"]

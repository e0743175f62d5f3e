"""Sampling: from logits to tokens, the same ones in any batch."""

from quire.compute.sampling.candidates import CandidateOutput, find_candidates
from quire.compute.sampling.device_columns import DeviceColumns
from quire.compute.sampling.device_extras import (
    DeviceExtras,
    DeviceHistory,
    DeviceLogprobs,
    ExtraSample,
)
from quire.compute.sampling.device_sampler import DeviceSample, DeviceSampler
from quire.compute.sampling.logprobs import ReadLogprobs, prompt_logprobs, token_logprobs
from quire.compute.sampling.sampler import (
    BANNED,
    NO_TOKEN,
    Draw,
    RowsOfMasks,
    SampleOutput,
    Sampler,
    TokenHistory,
    failures_of,
    mask_arguments,
)
from quire.compute.sampling.state import SamplingState

__all__ = [
    "BANNED",
    "NO_TOKEN",
    "CandidateOutput",
    "DeviceColumns",
    "DeviceExtras",
    "DeviceHistory",
    "DeviceLogprobs",
    "DeviceSample",
    "DeviceSampler",
    "Draw",
    "ExtraSample",
    "ReadLogprobs",
    "SampleOutput",
    "RowsOfMasks",
    "Sampler",
    "SamplingState",
    "TokenHistory",
    "failures_of",
    "find_candidates",
    "mask_arguments",
    "prompt_logprobs",
    "token_logprobs",
]

"""A fingerprint of everything that decides what K/V an engine computes for given tokens.

Engines with equal fingerprints and one secret give equal names to blocks, whatever folder their
model is in; a changed model never hits blocks of the old one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import BinaryIO

from quire.config.checkpoint import Checkpoint
from quire.config.hf import StoredTensor
from quire.config.model_spec import GenerationDefaults
from quire.config.resolve import Resolved

__all__ = ["fingerprint"]

SAMPLE_BYTES = 64
"""Read at the start, in the middle and at the end of each tensor.
Training changes nearly all numbers of the tensors that it changes at all."""


def fingerprint(
    resolved: Resolved, checkpoint: Checkpoint | None, kernel_family: str, weights: bytes = b""
) -> bytes:
    """32 bytes over the model's config, its weights, the layout and format of the KV cache, and the
    kernels.

    Of the weights it covers names, shapes, dtypes and samples (`SAMPLE_BYTES`), so it misses an
    edit of a few numbers, unless `weights` is a digest of all of them. checkpoint: None for made-up
    weights, which the seed decides.
    """
    settings = resolved.settings
    spec = replace(resolved.spec, generation=GenerationDefaults(), eos_token_ids=())
    digest = hashlib.blake2b(digest_size=32)
    parts = (spec, resolved.layout, settings.kv_cache_dtype, settings.quantization, kernel_family)
    for part in parts:
        _add(digest, repr(part).encode())
    is_quantized = settings.quantization is not None or (
        checkpoint is not None and checkpoint.packed
    )
    if settings.activation_bits == 16 and is_quantized:
        _add(digest, b"activations of 16 bits")
    if settings.rank_invariant:
        _add(digest, b"any number of ranks")
    elif settings.tensor_parallel_size > 1:  # sums over ranks round otherwise
        _add(digest, f"ranks {settings.tensor_parallel_size}".encode())
    if checkpoint is None:
        _add(digest, f"seed {settings.seed}".encode())
    else:
        for part in _samples(checkpoint, with_others=spec.images is not None):
            _add(digest, part)
    if weights:
        _add(digest, weights)
    return digest.digest()


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    """With its length, so that no two lists of parts read the same."""
    digest.update(len(part).to_bytes(8, "little") + part)


def _samples(checkpoint: Checkpoint, *, with_others: bool) -> Iterable[bytes]:
    whole = (*checkpoint.tensors.values(), *(checkpoint.others.values() if with_others else ()))
    stored = [part for tensor in whole for part in tensor.stored]
    tensors = sorted((*stored, *checkpoint.cache_scales), key=lambda tensor: tensor.name)
    files = {path: path.open("rb") for path in {tensor.file for tensor in tensors}}
    try:
        for tensor in tensors:
            yield f"{tensor.name} {tensor.dtype} {tensor.shape}".encode()
            yield from _sample(files[tensor.file], tensor)
    finally:
        for file in files.values():
            file.close()


def _sample(file: BinaryIO, tensor: StoredTensor) -> Iterable[bytes]:
    last = max(tensor.start, tensor.end - SAMPLE_BYTES)
    for place in (tensor.start, (tensor.start + last) // 2, last):
        file.seek(place)
        yield file.read(min(SAMPLE_BYTES, tensor.end - place))

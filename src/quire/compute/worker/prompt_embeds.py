"""Embeddings of prompts and of images, as requests bring them: bytes of `torch.save`, of
safetensors, or arrays.

Bytes are a stranger's. They are checked before anything is made of them: a small file may claim to
be a large tensor.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from typing import Any, cast

import safetensors.torch
import torch

from quire.base.errors import RequestError

__all__ = ["digest_of", "read_embeds"]

_ZIP_MAGIC = b"PK\x03\x04"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ADVICE = "send the bytes of torch.save(tensor, file) or of safetensors, with one tensor"


def read_embeds(
    data: object, width: int, num_rows: range, dtype: torch.dtype, name: str = "prompt_embeds"
) -> torch.Tensor:
    """Rows [N, width] in `dtype`, in memory of their own. data: bytes, or within one process a
    tensor or an array. num_rows: numbers of rows that may come. name: name for errors. RequestError
    for what is none of these, has another shape, or has numbers that are not finite."""
    try:
        return _read(data, width, num_rows, dtype)
    except RequestError as error:
        raise RequestError(f"{name} {error}") from error


def _read(data: object, width: int, num_rows: range, dtype: torch.dtype) -> torch.Tensor:
    """Errors follow the name."""
    found = _tensor_of(data)
    kind = _why_no_matrix(found)
    if kind is not None:
        raise RequestError(f"is {kind}: give a dense tensor of floats")
    shape = list(found.shape)
    if found.dim() != 2 or shape[1] != width or shape[0] not in num_rows:
        counts = f"1 to {num_rows[-1]}" if len(num_rows) > 1 else f"{num_rows[0]}"
        raise RequestError(
            f"has the shape {shape}: this model takes [N, {width}] with {counts} rows, one for "
            "each token"
        )
    with torch.inference_mode():
        rows = found.detach().to("cpu", dtype, copy=True).contiguous()
        if not torch.isfinite(rows).all():
            raise RequestError(
                f"has numbers that are not finite in {str(dtype)[6:]}, in which the model "
                "computes: give others"
            )
    return rows


def digest_of(rows: torch.Tensor) -> bytes:
    """A name of their content."""
    data = rows.view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=32, person=b"prompt embeds").digest()


def _tensor_of(data: object) -> torch.Tensor:
    if isinstance(data, bytes):
        return _of_torch(data) if data.startswith(_ZIP_MAGIC) else _of_safetensors(data)
    if isinstance(data, torch.Tensor):
        return data
    try:
        return torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"is a {type(data).__name__}: give a tensor [N, hidden size] ({error})"
        ) from error


def _of_torch(data: bytes) -> torch.Tensor:
    """Only data is read, no code. What is packed inside must not be larger than it looks."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(item.file_size for item in archive.infolist())
        if unpacked > len(data):
            raise RequestError(
                f"unpacks from {len(data)} to {unpacked} bytes: {_ADVICE}, not compressed"
            )
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except RequestError:
        raise
    except Exception as error:  # whatever a stranger's file makes of it
        raise _unreadable(error) from error
    if not isinstance(found, torch.Tensor):
        raise RequestError(f"holds a {type(found).__name__}: {_ADVICE}")
    return found


def _of_safetensors(data: bytes) -> torch.Tensor:
    try:
        found = safetensors.torch.load(data)
    except Exception as error:
        raise _unreadable(error) from error
    if len(found) != 1:
        raise RequestError(f"holds {len(found)} tensors: {_ADVICE}")
    return next(iter(cast("Mapping[str, torch.Tensor]", found).values()))


def _unreadable(error: Exception) -> RequestError:
    reason = " ".join(str(error).split())[:200]
    return RequestError(f"cannot be read ({reason}): {_ADVICE}")


def _why_no_matrix(tensor: Any) -> str | None:
    """Say why a tensor is no plain matrix of floats in host or GPU memory; None if it is."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "sparse or quantized"
    if tensor.is_meta:
        return "a tensor without data"
    if tensor.dtype not in _DTYPES:
        return f"of {str(tensor.dtype).removeprefix('torch.')}"
    return None

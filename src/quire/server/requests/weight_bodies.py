"""Bodies of requests that update the weights of the engine, with vLLM's names."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["FinishWeightUpdate", "InitWeightTransfer", "UpdateWeights", "WeightUpdateInfo"]


class InitWeightTransfer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /init_weight_transfer_engine. init_info: the transport; `{"backend": "file"}`, or
    empty."""

    init_info: dict[str, Any]


class WeightUpdateInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tensors of an update, as numbers or in files. names, dtype_names, shapes: lists in vLLM's
    form, with an item for every tensor. tensors: numbers of each, little-endian, in C order, as
    base64. path: a safetensors file, or a folder with some, within the server's `weights_folder`.
    packed, ipc_handles_pickled: announcements of transports between GPUs, which are refused."""

    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[list[int]] | None = None
    tensors: list[bytes] | None = None
    path: str | None = None
    packed: bool | None = None
    ipc_handles_pickled: str | None = None


class UpdateWeights(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights."""

    update_info: WeightUpdateInfo


class FinishWeightUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /finish_weight_update. weight_version: label of outputs made with the new weights; the
    number of updates if it is left out."""

    weight_version: str | None = None

"""The clients that a core serves, and their requests in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from quire.protocol.messages import HANDLES_PER_CLIENT, client_of
from quire.protocol.request import EngineOutput

__all__ = ["ClientTable", "ConnectedClient", "split_by_client"]

V = TypeVar("V")


@dataclass(slots=True)
class ConnectedClient:
    """peer: identity of its connection. live: handles that have not finished. media: handles under
    which it has given some. coming: handles of media that are being encoded."""

    client_id: int
    peer: bytes
    live: set[int] = field(default_factory=set[int])
    media: set[int] = field(default_factory=set[int])
    coming: set[int] = field(default_factory=set[int])


class ClientTable:
    """Clients by their number and by their connection."""

    def __init__(self) -> None:
        self._by_id: dict[int, ConnectedClient] = {}
        self._by_peer: dict[bytes, ConnectedClient] = {}

    def of_peer(self, peer: bytes) -> ConnectedClient | None:
        return self._by_peer.get(peer)

    def of_id(self, client_id: int) -> ConnectedClient | None:
        return self._by_id.get(client_id)

    def __iter__(self) -> Iterator[ConnectedClient]:
        return iter(list(self._by_id.values()))

    def enter(self, client_id: int, peer: bytes) -> None:
        """A client connects. It must not be known, nor its connection."""
        client = ConnectedClient(client_id, peer)
        self._by_id[client_id] = self._by_peer[peer] = client

    def leave(self, client: ConnectedClient) -> None:
        del self._by_id[client.client_id], self._by_peer[client.peer]

    def finished(self, handles: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for handle in handles:
            client = self._by_id.get(client_of(handle))
            if client is not None:
                client.live.discard(handle)


def split_by_client(output: EngineOutput) -> dict[int, EngineOutput]:
    """Split an output by client; clients without news have no entry."""
    owners = output.handles // HANDLES_PER_CLIENT
    ids = set(np.unique(owners).tolist())
    for handles in (
        output.logprobs, output.prompt_logprobs, output.num_cached_tokens, output.vectors
    ):  # fmt: skip
        ids |= {client_of(handle) for handle in handles}
    ids |= {client_of(finish.handle) for finish in output.finished}
    if len(ids) == 1:
        return {ids.pop(): output}
    return {client_id: _part(output, owners == client_id, client_id) for client_id in ids}


def _part(output: EngineOutput, mine: np.ndarray, client_id: int) -> EngineOutput:
    def own(entries: Mapping[int, V]) -> dict[int, V]:
        return {handle: v for handle, v in entries.items() if client_of(handle) == client_id}

    return replace(
        output,
        handles=output.handles[mine],
        token_ids=output.token_ids[mine],
        logprobs=own(output.logprobs),
        prompt_logprobs=own(output.prompt_logprobs),
        num_cached_tokens=own(output.num_cached_tokens),
        vectors=own(output.vectors),
        finished=tuple(f for f in output.finished if client_of(f.handle) == client_id),
    )

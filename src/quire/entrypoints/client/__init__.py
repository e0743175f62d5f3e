"""A running server as its clients see it."""

from quire.entrypoints.client.remote import RemoteServer, ServerAddress

__all__ = ["RemoteServer", "ServerAddress"]

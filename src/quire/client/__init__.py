"""A running server as its clients see it."""

from quire.client.remote import RemoteServer, ServerAddress

__all__ = ["RemoteServer", "ServerAddress"]

"""The Messages API: its requests as chats, and answers of chats in its form."""

__all__: list[str] = []

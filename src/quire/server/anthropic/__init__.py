"""The Messages API: its requests become chats, and answers of chats take its form."""

__all__: list[str] = []

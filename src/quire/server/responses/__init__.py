"""The Responses API: its requests become chats, answers of chats take its form, and responses are
kept."""

__all__: list[str] = []

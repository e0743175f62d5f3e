"""The Responses API: its requests as chats, answers of chats in its form, and what it keeps."""

__all__: list[str] = []

"""Writing, copying and swapping blocks of the KV cache."""

__all__: list[str] = []

"""quire: LLM inference and serving with a paged KV cache."""

__all__: list[str] = []

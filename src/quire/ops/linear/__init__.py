"""Products with weight matrices, plain or packed in few bits, and embeddings."""

__all__: list[str] = []

"""Products with weight matrices, plain and packed in few bits, and embeddings."""

__all__: list[str] = []

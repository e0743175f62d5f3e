"""Bodies of requests, their bounds, and errors as clients read them."""

__all__: list[str] = []

"""Bodies of requests, their bounds, and errors in the form that clients read."""

__all__: list[str] = []

"""KV blocks on their way to host memory and back."""

__all__: list[str] = []

"""KV blocks on their way to tiers beyond the device and back."""

__all__: list[str] = []

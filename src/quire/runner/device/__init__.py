"""What a device needs whose memory is not the host's: a copy of the rows, and the order of work."""

__all__: list[str] = []

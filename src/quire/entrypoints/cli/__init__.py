"""The command line. Nothing here imports torch; what computes is imported when it is needed."""

__all__: list[str] = []

"""The data side: computes what a plan says, and never imports the plan side."""

__all__: list[str] = []

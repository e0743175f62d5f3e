"""Chat and completions in the form of the OpenAI API."""

__all__: list[str] = []

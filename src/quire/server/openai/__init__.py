"""Chat and completions as the OpenAI API writes them."""

__all__: list[str] = []

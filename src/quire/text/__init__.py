"""Text and tokens: chat templates, tokenizers, tool calls and thinking."""

__all__: list[str] = []

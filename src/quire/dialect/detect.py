"""Which dialect a model has: from its chat template and its tokenizer."""

from __future__ import annotations

from quire.dialect.families import DIALECTS, GENERIC
from quire.dialect.spec import Dialect
from quire.errors import ConfigError
from quire.rendering.chat_template.template import ChatTemplate
from quire.rendering.tokenizer import Tokenizer

__all__ = ["find_dialect"]


def find_dialect(
    template: ChatTemplate | None, tokenizer: Tokenizer, parser_name: str | None = None
) -> Dialect:
    """The dialect in which a model writes. parser_name: one to take in any case. ConfigError for a
    name that none has."""
    if parser_name is not None:
        if parser_name not in DIALECTS:
            raise ConfigError(
                f"There is no tool call parser {parser_name!r}. Give one of "
                f"{', '.join(sorted(DIALECTS))}, or none: the format is found from the model."
            )
        return DIALECTS[parser_name].bound(tokenizer)
    source = template.source() if template is not None else ""
    for dialect in DIALECTS.values():
        if dialect.markers and all(marker in source for marker in dialect.markers):
            return dialect.bound(tokenizer)
    return GENERIC.bound(tokenizer)

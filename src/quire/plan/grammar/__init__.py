"""Structured output: the tokens that may follow an output. Never imports torch."""

from quire.plan.grammar.matcher import ANY_TOKEN, Grammar, Grammars, Mask, Matcher

__all__ = ["ANY_TOKEN", "Grammar", "Grammars", "Mask", "Matcher"]

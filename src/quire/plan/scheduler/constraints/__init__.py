"""Rules on what is drawn: masks of grammars (`masks`), checks of drawn tokens (`tails`)."""

__all__: list[str] = []

"""Steps that are captured once and then replayed: decode graphs and mixed graphs."""

__all__: list[str] = []

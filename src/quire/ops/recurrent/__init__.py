"""Operations of layers with recurrent states."""

__all__: list[str] = []

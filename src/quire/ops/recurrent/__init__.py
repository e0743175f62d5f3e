"""Operations of layers with recurrent states."""

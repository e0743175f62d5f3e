"""The evaluations of the PagedAttention paper and of its author's thesis, by simulation."""

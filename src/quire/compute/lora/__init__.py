"""Low-rank adapters of rows (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

__all__: list[str] = []

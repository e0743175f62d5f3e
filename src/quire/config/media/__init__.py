"""Media that models read beside text, as their checkpoints describe them. Nothing here needs torch.

`images.py` finds the description of a checkpoint's images. Each family has a file of its own.
"""

__all__: list[str] = []

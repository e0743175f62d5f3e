"""K/V on a disk: the files, their format, and the folder that stores share."""

__all__: list[str] = []

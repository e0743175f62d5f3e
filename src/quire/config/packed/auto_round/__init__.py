"""AutoRound: settings of folders whose matrices are packed as those of GPTQ and AWQ."""

__all__: list[str] = []

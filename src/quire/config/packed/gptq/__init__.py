"""GPTQ: `scheme.py` says what is stored, `read.py` what the bits mean."""

__all__: list[str] = []

"""ERNIE 4.5, dense (Baidu 2025), as a package that adds a model family to quire.

    pip install examples/custom_model
    quire check-model path/to/ERNIE-4.5-0.3B-PT     # compare it with transformers, layer by layer
    quire serve path/to/ERNIE-4.5-0.3B-PT

`spec.py` reads config.json and imports no torch; `model.py` has the layers and the names of the
tensors. `pyproject.toml` registers both under the name of the architecture.
"""

"""No key of config.json is passed over: each is changed alone in a tiny model of every family, and
where that changes the logits of `transformers`, quire's are the same, or it refuses the key by
name."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.families import BASES, CASES, VOCAB, Case
from tests.models.harness import PagedModel

from quire.errors import ConfigError

CHANGE = 1e-3
"""Of the largest logit: a key that changes less has no effect."""

TOLERANCE = 1e-4
FAMILIES = {case.model_type: case for case in reversed(CASES)}
"""The first case of each family."""

TOKENS = torch.randint(0, VOCAB, (1, 41), generator=torch.Generator().manual_seed(5))
PASSED_OVER = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "return_dict",
}  # fmt: skip
"""What a file says of itself, and which results the library gives."""

NAMED_BY = {"layer_types": "sliding_window", "hidden_size": "head_dim"}
"""Keys by which a value of another one may be refused, since they decide together."""


def candidates(key: str, value: Any) -> list[Any]:
    """Other values of the type, likely ones first."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value // 2, 2 * value, value + 1, value + 2]
    if isinstance(value, float):
        return [1.5 * value or 0.25, 50 * value, value / 2]
    if isinstance(value, str) and "act" in key:
        return [name for name in ("gelu", "relu", "silu", "gelu_new", "mish") if name != value]
    if isinstance(value, str):
        return ["sliding_attention", "linear", "dynamic"]
    if isinstance(value, list):
        return [*other_lists(value)]
    return [3, 0.5, True, "gelu"] if value is None else []


def other_lists(value: list[Any]) -> Iterator[list[Any]]:
    if not value:
        yield [0]
    elif isinstance(value[0], str):
        yield ["full_attention"] * len(value)
        yield ["sliding_attention"] * len(value)
    elif all(each in (0, 1) for each in value):
        yield [1 - each for each in value]
    else:
        yield [1.5 * each for each in value]


def changes(config: Mapping[str, Any]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Each key, also of nested objects, the key above it, and configs with other values there."""
    for key, value in config.items():
        if key in PASSED_OVER:
            continue
        if isinstance(value, dict):
            for inner, _, nested in changes(value):
                yield inner, key, [{**config, key: each} for each in nested]
        else:
            yield key, key, [{**config, key: each} for each in candidates(key, value)]


def model_of(config: Mapping[str, Any], model_type: str) -> Any:
    """A model whose tensors depend on their names and shapes alone. None if there is none."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {k: v for k, v in config.items() if k not in ("model_type", "transformers_version")}
    try:
        made = CONFIG_MAPPING[model_type](**values)
        made._attn_implementation = "sdpa" if model_type == "falcon" else "eager"
        model = AutoModelForCausalLM.from_config(made).eval()
    except Exception:  # noqa: BLE001  whatever it raises, there is no such model
        return None
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            is_buffer = "." not in name or name not in dict(model.named_parameters())
            if is_buffer and not name.endswith(("e_score_correction_bias", "layer_scalar")):
                continue
            seed = zlib.crc32(f"{name}{list(tensor.shape)}".encode())
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.2
            is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            is_factor = is_norm or name.endswith("layer_scalar")
            tensor.copy_(noise + 1.0 if is_factor else noise)
    return model


def logits_of(model: Any) -> torch.Tensor | None:
    """None if it cannot compute."""
    try:
        with torch.inference_mode():
            return model(TOKENS.clamp(max=model.config.vocab_size - 1), use_cache=False).logits[0]
    except Exception:  # noqa: BLE001  whatever it raises, there is nothing to compare
        return None


def differ(found: torch.Tensor, other: torch.Tensor, by: float) -> bool:
    if found.shape != other.shape:
        return True
    return not bool((found - other).abs().max() <= by * other.abs().max())


def first_that_changes(
    configs: list[dict[str, Any]], case: Case, before: torch.Tensor
) -> tuple[Any, torch.Tensor] | None:
    for config in configs:
        model = model_of(config, case.model_type)
        logits = None if model is None else logits_of(model)
        if logits is not None and logits.isfinite().all() and differ(logits, before, CHANGE):
            return model, logits
    return None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_key_is_passed_over(model_type: str, tmp_path: Path) -> None:
    case = FAMILIES[model_type]
    whole = {**BASES.get(model_type, {}), **case.extra}
    base = model_of(whole, model_type)
    before = logits_of(base)
    assert before is not None
    compared: list[str] = []
    wrong: list[str] = []
    for number, (key, above, configs) in enumerate(changes(base.config.to_dict())):
        found = first_that_changes(configs, case, before)
        if found is None:
            continue
        compared.append(key)
        folder = tmp_path / str(number)
        found[0].save_pretrained(folder)
        problem = problem_of(folder, found[1], (key, above))
        if problem is not None:
            value = json.loads((folder / "config.json").read_text()).get(above)
            wrong.append(f"{key} (now {above}={value}): {problem}")
    assert len(compared) >= 5
    assert not wrong, "\n".join(wrong)


def problem_of(folder: Path, wanted: torch.Tensor, keys: tuple[str, str]) -> str | None:
    try:
        model = PagedModel(folder, "reference", 64)
    except ConfigError as error:
        names = (*keys, *(NAMED_BY[key] for key in keys if key in NAMED_BY))
        named = any(name in str(error) for name in names)
        return None if named else f"refused without its name: {error}"
    tokens = TOKENS[0].clamp(max=model.spec.vocab_size - 1).tolist()
    found = model.step({0: tokens})[0]
    return (
        f"differs by {(found - wanted).abs().max():.1e}"
        if differ(found, wanted, TOLERANCE)
        else None
    )

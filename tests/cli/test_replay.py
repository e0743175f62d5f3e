"""`quire replay`: equal, or the first difference; and files that are no receipts."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image

from quire import LLM, LoRARequest, RequestOutput, SamplingParams
from quire.bundled import bundled_model_path
from quire.engine.stated_media import is_tensor
from quire.entrypoints.cli.main import main
from quire.protocol.receipts import Receipt
from tests.engine.test_laws import has_kernels
from tests.engine.test_receipts import forged
from tests.image_writer import IMAGE, as_bytes, data_url, picture, write_vision_checkpoint
from tests.lora.adapters import write_adapter

pytestmark = pytest.mark.skipif(not has_kernels(), reason="torch sums rows by their number")

PARAMS = SamplingParams(max_tokens=10, seed=3, n=2, temperature=0.8, deterministic=True)
SETTINGS = {"num_kv_blocks": 64, "max_model_len": 128, "quiet": True}
SMALL_FLAGS = ("--num-kv-blocks", "32", "--max-model-len", "64", "--max-num-seqs", "1")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def copied(folder: Path) -> Path:
    shutil.copytree(bundled_model_path(), folder, ignore=shutil.ignore_patterns("*.py", "__*"))
    return folder


def made(model: str | None, file: Path, adapter: Path | None = None) -> Receipt:
    settings = SETTINGS if adapter is None else {**SETTINGS, "enable_lora": True}
    lora = None if adapter is None else LoRARequest("style", 1, str(adapter))
    with LLM(model, **settings) as llm:
        return kept(llm.generate("The ", PARAMS, use_tqdm=False, lora_request=lora), file)


def kept(outputs: list[RequestOutput], file: Path) -> Receipt:
    """Write the receipt of the only output."""
    (output,) = outputs
    assert output.receipt is not None, output.error
    file.write_text(output.receipt.to_json())
    return output.receipt


def replay(capsys: pytest.CaptureFixture[str], file: Path, *flags: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["replay", str(file), *SMALL_FLAGS, *flags])
    found = capsys.readouterr()
    return status, found.out, found.err


def test_an_answer_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a model: the receipt names the bundled one. A list of receipts is one after the
    other, by one engine if they state the same."""
    file = tmp_path / "receipt.json"
    receipt = made(None, file)
    assert receipt.evidence.model == "bundled"
    tokens = sum(each.num_tokens for each in receipt.statement.samples)
    line = f"equal: 2 answers, {tokens} tokens and their log-probabilities ({receipt.id})\n"
    assert replay(capsys, file)[:2] == (0, line)
    document = json.loads(receipt.to_json())
    file.write_text(json.dumps({"object": "list", "data": [document, document]}))
    begun, start = list[None](), LLM.__enter__
    monkeypatch.setattr(LLM, "__enter__", lambda llm: begun.append(None) or start(llm))
    assert replay(capsys, file)[:2] == (0, line * 2)
    assert len(begun) == 1


def test_a_changed_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one sentence: a byte of the weights, and the template."""
    model, file = copied(tmp_path / "model"), tmp_path / "receipt.json"
    made(str(model), file)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    status, out, _ = replay(capsys, file)
    assert (status, out.count("\n")) == (1, 1)
    assert out.startswith("different: model.weights is ")
    content[-2] ^= 1
    weights.write_bytes(content)
    assert replay(capsys, file)[0] == 0
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "\n{# #}")
    status, out, _ = replay(capsys, file)
    assert (status, out.count("\n")) == (1, 1)
    assert out.startswith("different: text.template is ")


def test_another_engine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags win over the receipt, and then differ from it; `--model` may be another folder of the
    same model."""
    file, other = tmp_path / "receipt.json", copied(tmp_path / "other")
    made(None, file)
    status, out, _ = replay(capsys, file, "--dtype", "bfloat16", "--quantization", "int8")
    assert status == 1
    assert out.startswith("different: engine.")
    assert replay(capsys, file, "--model", str(other))[0] == 0


def test_another_token_is_named_with_both_logprobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "receipt.json"
    params = SamplingParams(max_tokens=6, temperature=0, deterministic=True)
    with LLM(**SETTINGS) as llm:
        receipt = kept(llm.generate("The ", params, use_tqdm=False), file)
    token = receipt.evidence.samples[0].token_ids[2]
    file.write_text(forged(receipt, 2, token_ids=token + 1).to_json())
    status, out, _ = replay(capsys, file)
    assert status == 1
    assert out.startswith(f"different: token 3 of the answer is {token} ")
    assert out.count("log-probability") == 2


def test_adapters_are_given_by_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = copied(tmp_path / "model"), tmp_path / "receipt.json"
    adapter = write_adapter(tmp_path / "adapter", model, ["v_proj"], rank=2)
    made(str(model), file, adapter)
    status, _, err = replay(capsys, file)
    assert status == 2
    assert "the adapter 'style' computed the answer" in err
    assert replay(capsys, file, "--adapter", str(adapter))[0] == 0
    other = write_adapter(tmp_path / "other", model, ["v_proj"], rank=2, seed=1)
    status, out, _ = replay(capsys, file, "--adapter", str(other))
    assert status == 1
    assert out.startswith("different: model.adapter is ")


def test_images_are_given_by_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: an answer about an image cannot be made again, or another image gives the same."""
    model, file = write_vision_checkpoint(tmp_path / "vision"), tmp_path / "receipt.json"
    cat, other = tmp_path / "cat.png", data_url(picture(100, 70, seed=1))
    cat.write_bytes(as_bytes(picture(100, 70)))
    sizes = ("--num-kv-blocks", "128", "--max-model-len", "512")
    settings = {"dtype": "float32", "num_kv_blocks": 128, "max_model_len": 512, "quiet": True}
    with LLM(str(model), **settings) as llm:
        text = f"User:{IMAGE}What?<end_of_utterance>\nAssistant:"
        ids = llm.engine.renderer.render_prompt(text, add_special_tokens=False).token_ids
        given = {"prompt_token_ids": ids, "multi_modal_data": {"image": cat}}
        kept(llm.generate(given, PARAMS, use_tqdm=False), file)
    status, _, err = replay(capsys, file, *sizes)
    assert status == 2
    assert "the prompt has 1 images or embeddings" in err and "(--media)" in err
    status, out, err = replay(capsys, file, *sizes, "--media", str(cat))
    assert (status, out[:16]) == (0, "equal: 2 answers"), err
    status, out, _ = replay(capsys, file, *sizes, "--media", other)
    assert status == 1
    assert out.startswith("different: text.media is ")
    status, _, err = replay(capsys, file, *sizes, "--media", str(cat), other)
    assert status == 2
    assert "--media has 1 files more" in err


def test_embeddings_are_given_by_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, rows = tmp_path / "receipt.json", tmp_path / "rows.pt"
    with LLM(**SETTINGS, enable_prompt_embeds=True) as llm:
        size = llm.engine.spec.hidden_size
        embeds = torch.randn(5, size, generator=torch.Generator().manual_seed(1))
        torch.save(embeds, rows)
        kept(llm.generate({"prompt_embeds": embeds}, PARAMS, use_tqdm=False), file)
    status, out, err = replay(capsys, file, "--media", str(rows))
    assert (status, out[:16]) == (0, "equal: 2 answers"), err
    status, _, err = replay(capsys, file, "--media", str(rows), "--max-image-bytes", "999")
    assert (status, "more than 999 bytes. Give a larger --max-image-bytes" in err) == (2, True), err
    torch.save(embeds + 1.0, rows)
    status, out, _ = replay(capsys, file, "--media", str(rows))
    assert status == 1
    assert out.startswith("different: text.media is ")


def test_images_are_told_from_tensors() -> None:
    """Fault: a GIF that is 123 pixels high, which is "{" in its ninth byte, is taken for rows."""
    drawn = io.BytesIO()
    Image.new("RGB", (5, 123)).save(drawn, "GIF")
    assert drawn.getvalue()[8:9] == b"{" and not is_tensor(drawn.getvalue())
    packed = io.BytesIO()
    torch.save(torch.ones(2, 3), packed)
    assert is_tensor(packed.getvalue())
    assert is_tensor(safetensors.torch.save({"rows": torch.ones(2, 3)}))


def test_signatures_are_checked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, key = tmp_path / "receipt.json", tmp_path / "key"
    receipt = made(None, file)
    key.write_bytes(b"0123456789abcdef0123")
    status, _, err = replay(capsys, file, "--receipt-key", str(key))
    assert status == 2
    assert "others may read it" in err
    key.chmod(0o600)
    status, out, _ = replay(capsys, file, "--receipt-key", str(key))
    assert status == 1
    assert "did not sign" in out
    file.write_text(receipt.signed(key.read_bytes()).to_json())
    assert replay(capsys, file, "--receipt-key", str(key))[0] == 0


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "receipt.json"
    status, _, err = replay(capsys, file)
    assert status == 2
    assert "cannot be read" in err
    file.write_text('{"id": 5}')
    status, _, err = replay(capsys, file)
    assert status == 2
    assert "this is no receipt" in err
    receipt = made(None, file)
    document = json.loads(receipt.to_json())
    document["statement"]["choice"]["seed"] += 1
    file.write_text(json.dumps(document))
    status, _, err = replay(capsys, file)
    assert status == 2
    assert "contradicts itself at id" in err

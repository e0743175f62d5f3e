"""The memory explorer: its numbers, and its page, which loads nothing from outside."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.base.platform import GpuFacts, detect_platform
from quire.entrypoints.cli.main import main
from quire.entrypoints.simulator.explorer import MemoryQuestion, explore, render_memory, render_page
from quire.entrypoints.simulator.models import model_spec
from tests.gguf_writer import Tensor, write_gguf

QWEN = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-0.6b"
LLAMA = model_spec("llama-13b")
QUESTION = MemoryQuestion(context=2048, tokens=200, batch=32, device_bytes=40 * 2**30)


def test_numbers_are_those_of_the_article() -> None:
    """LLaMA-13B: 1.7 GB of K/V for 2,048 tokens, 26 GB of weights; a request of 200 of 2,048
    tokens wastes 90 % of what is reserved, and less than 4 % with pages."""
    table = explore(LLAMA, QUESTION)
    assert table.kv_reserved / 1e9 == pytest.approx(1.7, abs=0.03)
    assert table.kv_per_token == 2 * 40 * 40 * 128 * 2
    assert table.weights / 1e9 == pytest.approx(26, rel=0.01)
    assert table.waste_reserved == pytest.approx(0.902, abs=0.001)
    assert table.waste_paged == pytest.approx(8 / 208)
    assert table.fits_paged == table.room // (13 * 16 * table.kv_per_token)
    assert table.fits_paged > 9 * table.fits_reserved


def test_fewer_bits_take_less_and_a_small_device_holds_nothing() -> None:
    half = explore(LLAMA, replace(QUESTION, weight_bits=8, kv_bits=8))
    whole = explore(LLAMA, QUESTION)
    assert half.kv_per_token * 2 == whole.kv_per_token
    assert 0.5 < half.weights / whole.weights < 0.52
    none = explore(LLAMA, replace(QUESTION, device_bytes=2**30))
    assert (none.room, none.fits_paged, none.fits_reserved) == (0, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [{"tokens": 0}, {"tokens": 4096}, {"batch": -1}, {"weight_bits": 5}, {"kv_bits": 4}],
)
def test_impossible_questions_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        explore(LLAMA, replace(QUESTION, **changes))


class _Page(HTMLParser):
    """Ids, attributes that load something, and texts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.loads.append((tag, value or ""))
        if tag in ("link", "iframe", "img", "object", "embed", "base"):
            self.loads.append((tag, ""))
        if tag not in ("meta", "br", "input", "i"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def embedded(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_loads_nothing_from_outside() -> None:
    page = render_page("llama-13b", LLAMA, QUESTION)
    assert _Page(page).loads == []
    for word in ("http:", "https:", "//cdn", "@import", "url(", "fetch(", "XMLHttp", "import("):
        assert word not in page


def test_the_page_has_its_numbers_without_a_script() -> None:
    page = render_page("llama-13b", LLAMA, QUESTION)
    table = explore(LLAMA, QUESTION)
    assert render_memory(QUESTION, table) in page
    data = embedded(page)
    assert data["table"] == table.as_json()
    assert {"controls", "table", "bar-paged", "bar-reserved", "tables", "pool", "add", "fork",
            "end-b", "reset"} <= _Page(page).ids  # fmt: skip
    assert _Page(page).open.count("i") == 0


def test_names_cannot_break_out_of_the_page() -> None:
    page = render_page("</script><b>", LLAMA, QUESTION)
    assert "</script><b>" not in page
    assert "<b>" not in page


NODE = shutil.which("node")
STUB = """
const nodes = {};
function node() {
  return { children: [], style: {}, dataset: {}, textContent: "", listeners: {}, className: "",
    append(...c) { this.children.push(...c); }, replaceChildren(...c) { this.children = c; },
    addEventListener(n, f) { this.listeners[n] = f; },
    insertRow() { const r = node(); this.children.push(r); return r; },
    insertCell() { const c = node(); this.children.push(c); return c; } };
}
globalThis.document = {
  getElementById(id) { return nodes[id] = nodes[id] || node(); }, createElement: node };
"""
CHECK = """
const press = id => { nodes[id].listeners.click(); return nodes.said.textContent; };
const row = name => walk.rows[name].slice();
const out = { models: data.models.map(m => explore(m, state)), start: row("A") };
out.shown = nodes.table.textContent;
out.eighth = press("add"); out.ninth = press("add"); out.grown = row("A");
press("fork"); out.refs = Object.assign({}, walk.refs); out.forked = row("B");
out.copied = press("add-b"); out.diverged = row("B"); out.original = row("A");
press("end-b"); out.left = Object.keys(walk.refs).length; out.free = walk.free.length;
console.log(JSON.stringify(out));
"""


@pytest.mark.skipif(NODE is None, reason="no node to run the page's script")
def test_the_script_computes_the_same_numbers_and_walks_the_block_table(tmp_path: Path) -> None:
    """Turns red when the page's formulas part from `explore`, or a shared block is written."""
    page = render_page("llama-13b", LLAMA, QUESTION)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0]
    data = json.dumps(json.dumps(embedded(page)))
    path = tmp_path / "page.js"
    path.write_text(
        f"{STUB}\ndocument.getElementById('data').textContent = {data};\n"
        f"{script.replace(chr(34) + 'use strict' + chr(34) + ';', '')}\n{CHECK}"
    )
    assert NODE is not None
    result = subprocess.run([NODE, str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    out = json.loads(result.stdout)
    names = [model["name"] for model in embedded(page)["models"]]  # type: ignore[index]
    for name, table in zip(names, out["models"], strict=True):
        assert table == pytest.approx(explore(model_spec(name), QUESTION).as_json()), name
    assert "1.56 GiB" in out["shown"]
    assert len(out["start"]) == 2
    assert "free slot 3" in out["eighth"]
    assert len(out["grown"]) == 3
    assert out["forked"] == out["grown"]
    assert set(out["refs"].values()) == {2}
    assert "copies it" in out["copied"]
    assert out["diverged"][:2] == out["original"][:2]
    assert out["diverged"][2] != out["original"][2]
    assert (out["left"], out["free"]) == (3, 9)


def test_the_command_writes_the_page_and_prints_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "memory.html"
    assert main(["plan", "opt-66b", "--html", str(path), "--context", "1024"]) == 0
    shown = capsys.readouterr().out
    assert "fit, paged" in shown
    assert shown.strip() in path.read_text(encoding="utf-8")
    assert main(["plan", "--memory", "--json", "--tokens", "9"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_per_token"] > 0
    assert main(["plan", "opt-66b", "--html", str(tmp_path / "no" / "x.html")]) == 2


def test_the_command_counts_the_bits_of_the_file_and_this_machines_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Faults: 16 bits for each weight of a GGUF file, and 80 GiB of a device that nobody named."""
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": (96, 32), **{f"blk.0.{name}": (32, 32) for name in names}}
    tensors = {
        f"{name}.weight": Tensor("Q4_0", shape, bytes(shape[0] * 18))
        for name, shape in shapes.items()
    }
    settings = {f"llama.{key}": value for key, value in {
        "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-6,
    }.items()} | {"general.architecture": "llama"}  # fmt: skip
    path = write_gguf(tmp_path / "model.gguf", settings, tensors)
    found: dict[str, dict[str, float]] = {}
    for name, flags in {
        "file": [], "int8": ["--quantization", "int8"], "float32": ["--dtype", "float32"],
    }.items():  # fmt: skip
        assert main(["plan", str(path), *flags, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert main(["plan", str(path), *flags, "--memory", "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
        assert found[name]["weights"] == plan["memory"]["fixed"]["weights"], name
    assert found["file"]["bits_per_weight"] < 6 < found["int8"]["bits_per_weight"] < 16
    page = tmp_path / "page.html"
    assert main(["plan", str(path), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "bits in the mean" in shown and "80.0 GiB" not in shown
    assert "on this machine" in shown
    assert shown.strip() in page.read_text(encoding="utf-8")
    assert embedded(page.read_text())["question"]["weight_bits"] == 0  # type: ignore[index]
    assert main(["plan", str(path), "--memory", "--accelerators", "h100"]) == 0
    assert "of 80.0 GiB, NVIDIA H100" in capsys.readouterr().out


def test_memory_is_that_of_the_device_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a machine with a GPU showed its memory for `--device cpu`, too."""
    gpu = GpuFacts("nvidia", "NVIDIA L4", "SM 89", (8, 9), 24 * 2**30, 2**30, "580", (13, 0))
    found = replace(detect_platform(), gpu=gpu)
    monkeypatch.setattr("quire.base.platform.detect_platform", lambda: found)
    for flags, device in {(): "NVIDIA L4 of", ("--device", "cpu"): "free on"}.items():
        assert main(["plan", str(QWEN), "--memory", *flags]) == 0
        assert f"{device} this machine" in capsys.readouterr().out


def test_a_folder_with_a_config_alone_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Fault: a refusal, though a plan reads no weights."""
    config = json.loads((QWEN / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--max-model-len", "64"]) == 0
    shown = capsys.readouterr()
    assert "474.0 M parameters" in shown.out and "counted by config.json" in shown.out
    assert main(["plan", str(tmp_path), "--memory"]) == 0
    assert "16.0 bits in the mean" in capsys.readouterr().out
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path)]) == 2
    assert "no *.safetensors file" in capsys.readouterr().err

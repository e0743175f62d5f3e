"""A toy for each section of docs/how-to.md: the lines that it adds, and a script that proves it.

The lines go into a copy of `src` (`write_copy`), so the source stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

__all__ = ["TOYS", "Toy", "write_copy"]

SOURCE = Path(__file__).parents[1] / "src"


@dataclass(frozen=True)
class Toy:
    """example: the name in the paths of the section that stands for "toy". inserted: pairs of an
    anchor that is there once and the text that goes before it, by file. added: new files. check: a
    script that fails if the toy does not work."""

    example: str
    check: str
    inserted: Mapping[str, tuple[tuple[str, str], ...]]
    added: Mapping[str, str] = field(default_factory=dict[str, str])


def write_copy(toy: Toy, folder: Path) -> None:
    """Write `src` with the toy to a folder. What it leaves alone is a link: a file, or a folder
    without changes, in which compiled modules are found, too."""
    changed = [folder.parent / place for place in (*toy.inserted, *toy.added)]
    _link(SOURCE, folder, {parent for path in changed for parent in path.parents})
    for place, pairs in toy.inserted.items():
        path = folder.parent / place
        text = path.read_text(encoding="utf-8")
        for anchor, addition in pairs:
            assert text.count(anchor) == 1, f"{place} has {anchor!r} {text.count(anchor)} times"
            text = text.replace(anchor, addition + anchor)
        path.unlink()  # the link, not its target
        path.write_text(text, encoding="utf-8")
    for place, text in toy.added.items():
        path = folder.parent / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _link(source: Path, folder: Path, own: Collection[Path]) -> None:
    """Link what `source` holds into a new folder. Folders of `own` are no links, nor those of
    their compiled modules."""
    folder.mkdir()
    for path in source.iterdir():
        target = folder / path.name
        if target in own or path.name == "__pycache__":
            _link(path, target, own)
        else:
            target.symlink_to(path)


_PARAMETER = Toy(
    "repetition_penalty",
    """
from quire.base.errors import RequestError
from quire.protocol import SamplingParams
from quire.compute.sampling import reference
from tests.sampling.rows import sample_one
from tests.server.running import bundled_front, running_server
from tests.waiting import PatientClient

logits = [1.0, 3.0, 2.0, 9.0]
params = SamplingParams(temperature=0, highest_id=2)
assert sample_one(logits, params).token_ids[0] == 1
assert reference.edited_logits(logits, params, [], [])[3] == float("-inf")
try:
    SamplingParams(highest_id=-1)
except RequestError as error:
    assert "highest_id is -1" in str(error)
else:
    raise AssertionError("a bad value was taken")
body = {"prompt": "def", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
with running_server(bundled_front()) as server, PatientClient(base_url=server.url) as http:
    refused = http.post("/v1/completions", json={**body, "highest_id": -1}).json()["error"]
    assert refused["code"] == 400 and refused["param"] == "highest_id", refused
    taken = http.post("/v1/completions", json={**body, "highest_id": 300})
    assert taken.status_code == 200, taken.text
    assert server.client.added[-1].params.highest_id == 300
    schema = http.get("/openapi.json").json()["components"]["schemas"]
    for kind in ("ChatRequest", "MessagesRequest", "ResponsesRequest"):
        assert schema[kind]["properties"]["highest_id"]["anyOf"][0]["minimum"] == 0

import argparse
from quire.entrypoints.cli.flags.sampling import add_sampling_flags, given_sampling
parser = argparse.ArgumentParser()
add_sampling_flags(parser)
assert given_sampling(parser.parse_args(["--highest-id", "7"])) == {"highest_id": 7}
""",
    {
        "src/quire/protocol/sampling_params.py": (
            (
                "    logit_bias: Mapping[int, float] | None = parameter(\n",
                "    highest_id: int | None = parameter(\n"
                '        None, "no token above this one", low=0, high=MAX_INT,\n'
                '        advice="a token id", apis="all", has_flag=True,\n'
                "    )\n",
            ),
        ),
        "src/quire/compute/sampling/edits.py": (
            (
                "    edits = RowEdits(\n",
                "    if params.highest_id is not None:\n"
                "        allowed = [i for i in allowed or range(params.highest_id + 1)\n"
                "                   if i <= params.highest_id]\n",
            ),
        ),
        "src/quire/compute/sampling/reference.py": (
            (
                "    if params.allowed_token_ids is not None and",
                "    if params.highest_id is not None and token_id > params.highest_id:\n"
                "        return True\n",
            ),
        ),
    },
)

_ROUTE = Toy(
    "detokenize",
    """
from tests.server.running import bundled_front, running_server
from tests.waiting import PatientClient

with running_server(bundled_front()) as server, PatientClient(base_url=server.url) as http:
    assert http.post("/toy", json={"tokens": [5, 6]}).json() == {"highest": 6}
    refused = http.post("/toy", json={"tokens": []}).json()["error"]
    assert refused["code"] == 400 and refused["param"] == "tokens", refused
    assert http.post("/toy", json={"tokens": "x"}).status_code == 400
    assert http.get("/toy").headers["allow"] == "POST"
    document = http.get("/openapi.json").json()
    asked = document["paths"]["/toy"]["post"]
    body = asked["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert body.endswith("/ToyRequest"), body
    statuses = asked["responses"]
    assert {"200", "400", "401", "413", "503"} <= statuses.keys()
    answer = statuses["200"]["content"]["application/json"]["schema"]["$ref"]
    assert answer.endswith("/Toy"), answer
    assert asked["description"] == "The highest of token ids."
    assert 'handler="/toy",method="POST",status="2xx"' in http.get("/metrics").text
""",
    {
        "src/quire/server/routes/text.py": (
            (
                "from quire.server.requests.bodies import",
                "from quire.server.requests.bodies import ToyRequest\n",
            ),
            (
                "ROUTES = (\n",
                "class Toy(msgspec.Struct):\n"
                "    highest: int\n\n\n"
                "async def toy(call: Call[ToyRequest]) -> Toy:\n"
                '    """The highest of token ids."""\n'
                "    if not call.body.tokens:\n"
                '        raise RefusedError("tokens is empty. Send some.", param="tokens")\n'
                "    return Toy(max(call.body.tokens))\n\n\n",
            ),
            (
                '    Route("GET", "/tokenizer_info"',
                '    Route("POST", "/toy", toy, ToyRequest, Toy, needs=Needs.ROOM),\n',
            ),
        ),
        "src/quire/server/requests/bodies.py": (
            (
                "class DetokenizeRequest(",
                "class ToyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):\n"
                "    tokens: list[int]\n\n\n",
            ),
        ),
    },
)

_SERVES_TOY = """
import json, tempfile
from pathlib import Path
from quire import LLM, SamplingParams

with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(config))
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, quiet=True) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": [3, 4, 5]}, params, use_tqdm=False)
assert len(output.outputs[0].token_ids) == 5
"""
"""Given a config."""

_FAMILY = Toy(
    "arcee",
    """
config = {
    "model_type": "toy", "dtype": "float32", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}
"""
    + _SERVES_TOY,
    {
        "src/quire/config/families/llama.py": (
            (
                "def read_arcee(",
                "def read_toy(raw: RawConfig, dtype: str) -> ModelSpec:\n"
                '    traits = LlamaTraits(o_bias=True, norms="both")\n'
                "    return read_llama_like(raw, dtype, traits, (FULL,) * read_num_layers(raw))\n"
                "\n\n",
            ),
            (
                '    Family("Arcee',
                '    Family("Toy", _MODEL, "toy", {"ToyForCausalLM": read_toy}),\n',
            ),
        ),
    },
)

_SHAPE = Toy(
    "mpt",
    """
config = {
    "architectures": ["ToyForCausalLM"], "model_type": "toy", "dtype": "float32",
    "vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
}
"""
    + _SERVES_TOY,
    {
        "src/quire/config/families/__init__.py": (
            ("    mpt,\n", "    toy,\n"),
            ("    *mpt.FAMILIES,\n", "    *toy.FAMILIES,\n"),
        ),
    },
    {
        "src/quire/compute/models/toy.py": '''"""MPT whose tensors have other names."""

from dataclasses import replace

from quire.compute.models.mpt import WEIGHTS, MPTModel

__all__ = ["ToyModel"]


class ToyModel(MPTModel):
    weight_map = replace(WEIGHTS, prefix="toy.", embedding="toy.wte.weight")
''',
        "src/quire/config/families/toy.py": '''"""config.json of the toy."""

from quire.config.families.family import Family
from quire.config.families.mpt import read_mpt
from quire.config.hf import RawConfig
from quire.config.model_spec import ModelSpec

__all__ = ["FAMILIES"]


def read_toy(raw: RawConfig, dtype: str) -> ModelSpec:
    return read_mpt(raw.with_defaults({"expansion_ratio": 2}), dtype)


MODEL = "quire.compute.models.toy:ToyModel"
FAMILIES = (Family("Toy", MODEL, "toy", {"ToyForCausalLM": read_toy}),)
''',
    },
)

_FORMAT = Toy(
    "squeezellm",
    """
import tempfile
from pathlib import Path

import numpy as np
import torch
from quire import LLM, SamplingParams
from quire.config import read_checkpoint
from tests.packed_writer import all_but_head, stored_matrix, write_pair

def write(outputs, inputs, random):
    codes = torch.from_numpy(random.integers(-100, 100, (outputs, inputs)).astype(np.int8))
    step = torch.full((outputs,), 2.0**-9)
    return {"codes": codes, "step": step}, codes.float() * step[:, None]

with tempfile.TemporaryDirectory() as folder:
    packed, _, numbers = write_pair(Path(folder), {"quant_method": "toy"}, all_but_head(write))
    layouts = read_checkpoint(packed).packed
    assert len(layouts) == len(numbers) and layouts[0].kernel_on("cpu") is not None
    for layout in layouts:
        stored = stored_matrix(layout)
        stored.check()
        assert torch.equal(stored.numbers(), numbers[layout.module])
        part = stored.cut(range(32), range(stored.shape[1] // 2))
        assert torch.equal(part.numbers(), numbers[layout.module][:32, : stored.shape[1] // 2])
    with LLM(str(packed), skip_tokenizer_init=True, quiet=True) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": [3, 4, 5]}, params, use_tqdm=False)
assert len(output.outputs[0].token_ids) == 5
""",
    {
        "src/quire/config/packed/settings.py": (
            (
                "from quire.base.errors import",
                "from quire.config.packed.toy.scheme import FORMAT as TOY\n",
            ),
            ("    SQUEEZELLM,\n", "    TOY,\n"),
        ),
    },
    {
        "src/quire/config/packed/toy/__init__.py": "__all__: list[str] = []\n",
        "src/quire/config/packed/toy/scheme.py": '''"""Bytes with a step for each output."""

from dataclasses import dataclass
from typing import ClassVar

from quire.config.packed.format import Format, PackedSettings
from quire.config.packed.parts import Parts
from quire.config.packed.scheme import Scheme, block_kernel, found

__all__ = ["FORMAT", "Toy"]


@dataclass(frozen=True, slots=True)
class Toy(Scheme):
    name: ClassVar[str] = "toy"
    kinds: ClassVar[tuple[str, ...]] = ("codes", "step")
    floats: ClassVar[tuple[str, ...]] = ("step",)

    def holds(self, parts: Parts) -> bool:
        return "codes" in parts

    def measure(self, parts: Parts) -> tuple[int, int]:
        outputs, inputs = parts.matrix("codes", ("I8",))
        parts.expect("step", (outputs,), ("F32",))
        return outputs, inputs

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return found(block_kernel("w8", inputs, -1))


FORMAT = Format(
    methods={"toy": lambda raw: PackedSettings(raw.source, Toy())},
    readings="quire.config.packed.toy.read:READINGS",
)
''',
        "src/quire/config/packed/toy/read.py": '''"""Numbers of the toy."""

from quire.config.packed.read import Integers, Reading, axes_of
from quire.config.packed.toy.scheme import Toy

__all__ = ["READINGS"]


def _define(scheme, tensors, outputs):
    codes = tensors["codes"][outputs]
    return Integers(codes, 0, tensors["step"][outputs][:, None], codes.shape[1])


def _cut(scheme, tensors, part):
    outputs, inputs = axes_of(part)
    codes = inputs.of(outputs.of(tensors["codes"], 0), 1)
    return {"codes": codes, "step": outputs.of(tensors["step"], 0)}


READINGS = {Toy: Reading(_define, _cut)}
''',
    },
)

_OPERATION = Toy(
    "append_tokens",
    """
import torch
from quire.ops import ALL_OPS, build_op_set
from quire.base.platform import detect_platform

ops = build_op_set(detect_platform())
assert ops.chosen["toy"] == "numpy", ops.chosen["toy"]
cases = list(ALL_OPS["toy"].make_inputs(torch.Generator().manual_seed(1)))
assert cases
for case in cases:
    assert torch.equal(ops.toy(*case.args), ALL_OPS["toy"].reference(*case.args)), case.label
""",
    {
        "src/quire/ops/registry.py": (
            (
                "from quire.ops.sampling.draw import OP",
                "from quire.ops.rows.toy import OP as TOY\n",
            ),
            ("            APPEND_TOKENS,\n", "            TOY,\n"),
            ("    append_tokens: Callable[..., None]\n", "    toy: Callable[..., torch.Tensor]\n"),
        ),
    },
    {
        "src/quire/ops/rows/toy/__init__.py": '''"""Lengths of rows.

`toy(tokens) → int64 [R]`. tokens: int32 [R, L]; -1 is none.
"""

from quire.ops.operation import Op, exact
from quire.ops.rows.toy.cases import make_inputs
from quire.ops.rows.toy.cpu import PROVIDER
from quire.ops.rows.toy.reference import toy

__all__ = ["OP"]

OP = Op("toy", toy, make_inputs, exact(), (PROVIDER,))
''',
        "src/quire/ops/rows/toy/reference.py": '''"""The formula."""

import torch

__all__ = ["toy"]


def toy(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens >= 0).sum(dim=1)
''',
        "src/quire/ops/rows/toy/cases.py": '''"""One row and many."""

import torch

from quire.ops.operation import Case

__all__ = ["make_inputs"]


def make_inputs(generator):
    for rows in (1, 7):
        tokens = torch.randint(-1, 9, (rows, 5), generator=generator, dtype=torch.int32)
        yield Case(f"{rows} rows", (tokens,))
''',
        "src/quire/ops/rows/toy/cpu.py": '''"""The same in NumPy."""

import numpy as np
import torch

from quire.ops.native.team import ALONE
from quire.ops.operation import Provider

__all__ = ["PROVIDER"]


def _toy(tokens: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.count_nonzero(tokens.numpy() >= 0, axis=1))


PROVIDER = Provider("numpy", lambda platform: None, lambda team=ALONE: _toy)
''',
    },
)

_POLICY = Toy(
    "srtf",
    """
from quire import LLM, SamplingParams
from quire.plan.scheduler.policies import Toy

assert Toy.__name__ == "Toy"
with LLM(quiet=True, scheduling_policy="toy", max_num_seqs=1) as llm:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 12)]
    outputs = llm.generate(["import "] * 2, params, use_tqdm=False)
ends = [output.metrics.last_token_ts for output in outputs]
assert ends[1] < ends[0]
""",
    {
        "src/quire/plan/scheduler/policies/make.py": (
            (
                "from quire.plan.scheduler.policies.two_level",
                "from quire.plan.scheduler.policies.toy import Toy\n",
            ),
            ('    "fair": lambda', '    "toy": lambda _: Toy(),\n'),
        ),
        "src/quire/plan/scheduler/policies/__init__.py": (
            (
                "from quire.plan.scheduler.policies.two_level",
                "from quire.plan.scheduler.policies.toy import Toy\n",
            ),
            ('    "TwoLevel",\n', '    "Toy",\n'),
        ),
        "src/quire/config/settings.py": (('"two_level", "fair")\n', '"toy", '),),
    },
    {
        "src/quire/plan/scheduler/policies/toy.py": '''"""Longest answers first."""

from quire.plan.scheduler.policies.keyed import KeyedPolicy

__all__ = ["Toy"]


class Toy(KeyedPolicy):
    def key(self, group):
        return (-(group.request.params.max_tokens or 0), group.number)
''',
    },
)

_SOURCE = Toy(
    "fake_source",
    """
from quire import LLM, SamplingParams

settings = {"num_kv_blocks": 30, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
with LLM(quiet=True, skip_tokenizer_init=True, dtype="float32", **settings) as llm:
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    texts = [[start + i for i in range(41)] for start in (5, 100, 200, 300, 400)]
    first, *_ = [llm.generate({"prompt_token_ids": t}, params, use_tqdm=False) for t in texts]
    (again,) = llm.generate({"prompt_token_ids": texts[0]}, params, use_tqdm=False)
    assert again.num_cached_tokens == 40
    assert again.outputs[0].token_ids == first[0].outputs[0].token_ids
    assert llm.engine.client.stats().blocks_loaded_total == 10
""",
    {
        "src/quire/engine/build.py": (
            ("    kv = KVManager(\n", "    from tests.kv_cache.fake_source import FakeSource\n\n"),
            ("        keeps_evicted=", "        sources=[FakeSource(1, 100)],\n"),
        ),
        "src/quire/compute/kv_transfer/tiers.py": (
            (
                "    return Tiers(HostPages(copies))\n",
                """    from quire.compute.kv_transfer.block_copies import DirectCopies

    toy = HostPages(DirectCopies(copies._pages, 100, copies._swap_blocks))
    return Tiers(HostPages(copies), toy)
""",
            ),
        ),
    },
)

TOYS: Mapping[str, Toy] = MappingProxyType(
    {
        "Add a sampling parameter": _PARAMETER,
        "Add a route": _ROUTE,
        "Add a model family": _FAMILY,
        "Add a model family of a new shape": _SHAPE,
        "Add a checkpoint format": _FORMAT,
        "Add an operation": _OPERATION,
        "Add a source of K/V": _SOURCE,
        "Add a policy": _POLICY,
    }
)
"""Toys by the heading of their section."""

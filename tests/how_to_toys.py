"""A toy for each section of docs/how-to.md: the lines that it adds, and a script that proves it.

The lines go into a copy of `src` (`write_copy`), so the source stays as it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

__all__ = ["TOYS", "Toy", "write_copy"]

SOURCE = Path(__file__).parents[1] / "src"


@dataclass(frozen=True)
class Toy:
    """example: the name in the paths of the section that stands for "toy". inserted: by file, pairs
    of an anchor that is there once and the text that goes before it. added: new files. check: a
    script that fails if the toy does not work."""

    example: str
    check: str
    inserted: Mapping[str, tuple[tuple[str, str], ...]]
    added: Mapping[str, str] = field(default_factory=dict[str, str])


def write_copy(toy: Toy, folder: Path) -> None:
    """Write `src` with the toy to a folder. Files that it leaves alone are links."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE, folder, copy_function=os.symlink, ignore=ignored, dirs_exist_ok=True)
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


_PARAMETER = Toy(
    "repetition_penalty",
    """
from quire.errors import RequestError
from quire.protocol import SamplingParams
from quire.sampling import reference
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
""",
    {
        "src/quire/protocol/sampling_params.py": (
            (
                "    logit_bias: Mapping[int, float] | None = None\n",
                "    highest_id: int | None = None\n",
            ),
            (
                "        if self.max_tokens is not None:\n",
                "        if self.highest_id is not None:\n"
                '            _integer("highest_id", self.highest_id, 0, _MAX_INT, "a token id")\n',
            ),
        ),
        "src/quire/sampling/edits.py": (
            (
                "    edits = RowEdits(\n",
                "    if params.highest_id is not None:\n"
                "        allowed = [i for i in allowed or range(params.highest_id + 1)\n"
                "                   if i <= params.highest_id]\n",
            ),
        ),
        "src/quire/sampling/reference.py": (
            (
                "    if params.allowed_token_ids is not None and",
                "    if params.highest_id is not None and token_id > params.highest_id:\n"
                "        return True\n",
            ),
        ),
        "src/quire/server/requests/bodies.py": (
            (
                "    logit_bias: dict[str, float] | None = None\n",
                "    highest_id: int | None = None\n",
            ),
        ),
        "src/quire/cli/flags/sampling.py": (
            ('    ("max_tokens", int,', '    ("highest_id", int, "no token above this one"),\n'),
        ),
    },
)

_ROUTE = Toy(
    "tokenizer_info",
    """
from tests.server.running import bundled_front, running_server
from tests.waiting import PatientClient

with running_server(bundled_front()) as server, PatientClient(base_url=server.url) as http:
    assert http.get("/toy").json() == {"longest_token": 32}
    statuses = http.get("/openapi.json").json()["paths"]["/toy"]["get"]["responses"]
    assert {"200", "400", "503"} <= statuses.keys()
    answer = statuses["200"]["content"]["application/json"]["schema"]["$ref"]
    assert answer.endswith("/Toy"), answer
""",
    {
        "src/quire/server/routes/text.py": (
            (
                '    @router.get("/tokenizer_info")\n',
                '    @router.get("/toy")\n'
                "    async def toy() -> Response:\n"
                '        """Most characters of a token."""\n'
                "        tokenizer = _tokenizer(services.backend.require())\n"
                "        assert tokenizer.vocab_size > 0\n"
                '        return Response(encode({"longest_token": 32}), media_type=JSON)\n\n',
            ),
        ),
        "src/quire/server/routes/schema.py": (
            (
                "class Version(msgspec.Struct):\n",
                "class Toy(msgspec.Struct):\n    longest_token: int\n\n\n",
            ),
            ('    "/version": Version,\n', '    "/toy": Toy,\n'),
            ('    "/tokenizer_info": (400, 503),\n', '    "/toy": (400, 503),\n'),
        ),
    },
)

_FAMILY = Toy(
    "mpt",
    """
import json, tempfile
from pathlib import Path
from quire import LLM, SamplingParams

config = {
    "architectures": ["ToyForCausalLM"], "model_type": "toy", "dtype": "float32",
    "vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
}
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(config))
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, quiet=True) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": [3, 4, 5]}, params, use_tqdm=False)
assert len(output.outputs[0].token_ids) == 5
""",
    {
        "src/quire/models/registry.py": (
            (
                '        "NemotronForCausalLM"',
                '        "ToyForCausalLM": "quire.models.toy:ToyModel",\n',
            ),
        ),
        "src/quire/config/families/reader.py": (
            (
                "from quire.config.families.nested import",
                "from quire.config.families.toy import read_toy\n",
            ),
            ('    "NemotronForCausalLM": read_', '    "ToyForCausalLM": read_toy,\n'),
            ('    "nemotron": "NemotronForCausalLM",', '    "toy": "ToyForCausalLM",\n'),
        ),
    },
    {
        "src/quire/models/toy.py": '''"""MPT whose tensors have other names."""

from dataclasses import replace

from quire.models.mpt import WEIGHTS, MPTModel

__all__ = ["ToyModel"]


class ToyModel(MPTModel):
    weight_map = replace(WEIGHTS, prefix="toy.", embedding="toy.wte.weight")
''',
        "src/quire/config/families/toy.py": '''"""config.json of the toy."""

from quire.config.families.mpt import read_mpt
from quire.config.hf import RawConfig
from quire.config.model_spec import ModelSpec

__all__ = ["read_toy"]


def read_toy(raw: RawConfig, dtype: str) -> ModelSpec:
    return read_mpt(raw.with_defaults({"expansion_ratio": 2}), dtype)
''',
    },
)

_OPERATION = Toy(
    "append_tokens",
    """
import torch
from quire.ops import ALL_OPS, build_op_set
from quire.platform import detect_platform

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
from quire.scheduler.policies import Toy

assert Toy.__name__ == "Toy"
with LLM(quiet=True, scheduling_policy="toy", max_num_seqs=1) as llm:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 12)]
    outputs = llm.generate(["import "] * 2, params, use_tqdm=False)
ends = [output.metrics.last_token_ts for output in outputs]
assert ends[1] < ends[0]
""",
    {
        "src/quire/scheduler/policies/make.py": (
            (
                "from quire.scheduler.policies.two_level",
                "from quire.scheduler.policies.toy import Toy\n",
            ),
            ('    "fair": lambda', '    "toy": lambda _: Toy(),\n'),
        ),
        "src/quire/scheduler/policies/__init__.py": (
            (
                "from quire.scheduler.policies.two_level",
                "from quire.scheduler.policies.toy import Toy\n",
            ),
            ('    "TwoLevel",\n', '    "Toy",\n'),
        ),
        "src/quire/config/settings.py": (('"two_level", "fair")\n', '"toy", '),),
    },
    {
        "src/quire/scheduler/policies/toy.py": '''"""Longest answers first."""

from quire.scheduler.policies.keyed import KeyedPolicy

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
        "src/quire/kv_transfer/tiers.py": (
            (
                "    return Tiers(HostPages(copies))\n",
                """    from quire.kv_transfer.block_copies import DirectCopies

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
        "Add an operation": _OPERATION,
        "Add a source of K/V": _SOURCE,
        "Add a policy": _POLICY,
    }
)
"""Toys by the heading of their section."""

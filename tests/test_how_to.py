"""docs/how-to.md lists every place that names the example of each section, and the toys work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.config.settings import EngineSettings
from quire.plan.scheduler import KeyedPolicy
from quire.plan.scheduler.sequence import SequenceGroup
from tests.forked import Forked, template_of
from tests.how_to_toys import TOYS, write_copy

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
SUFFIXES = (".py", ".cpp", ".h")
EXAMPLES = {
    "Add a sampling parameter": r"\brepetition_penalty\b",
    "Add a parameter that ends outputs": r"\brepetition_detection\b",
    "Add a filter of draws": r"\bmin_p(_ptr)?\b",
    "Add a route": r"\bDetokenize(Request|Response)\b",
    "Add a model family": r"ArceeForCausalLM|read_arcee",
    "Add a model family of a new shape": r"MptForCausalLM|MPTModel|MPTTraits|mpt\.FAMILIES",
    "Add a family of image encoders": r"\bqwen_vl\b|\bQwen(Spec|Preparer|Tower)\b",
    "Add a checkpoint format": r"(?i)squeezellm",
    "Add an operation": r"\bappend_tokens\b",
    "Add a source of K/V": r"\bkeeps_evicted=|\bdef make_tiers\b",
    "Add a policy": r"(?i)\bsrtf\b",
}
"""Headings, and how the code names the example of each."""
MOST_SOURCE_FILES = {
    "Add a sampling parameter": 3,
    "Add a parameter that ends outputs": 4,
    "Add a route": 2,
    "Add a model family": 1,
    "Add a model family of a new shape": 3,
    "Add a family of image encoders": 4,
}
"""Bounds on the files in `src` that a thing touches: it has one home."""


def listed(heading: str) -> set[str]:
    """Paths in the first column of the table of a section."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {path for cell in cells for path in re.findall(r"`([^`]+)`", cell)}


@cache
def source_texts() -> Mapping[str, str]:
    """Return the source by its paths."""
    files = [path for path in (ROOT / "src").rglob("*") if path.suffix in SUFFIXES]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def test_every_section_is_checked():
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == list(EXAMPLES)


@pytest.mark.parametrize("heading", EXAMPLES)
def test_places_exist(heading: str):
    places = listed(heading)
    assert len(places) >= 4
    assert not [place for place in places if not (ROOT / place).is_file()]


@pytest.mark.parametrize("heading", EXAMPLES)
def test_every_place_in_the_source_is_listed(heading: str):
    """Turns red when a new file has to be touched too, or one need not be any more."""
    pattern = re.compile(EXAMPLES[heading])
    naming = {
        place
        for place, text in source_texts().items()
        if pattern.search(place) or pattern.search(text)
    }
    in_source = {place for place in listed(heading) if place.startswith("src/")}
    assert in_source == naming


@pytest.mark.parametrize("heading", MOST_SOURCE_FILES)
def test_a_thing_has_one_home(heading: str):
    """Turns red when something has to be declared in one more place."""
    sources = {place for place in listed(heading) if place.startswith("src/")}
    assert 1 <= len(sources) <= MOST_SOURCE_FILES[heading]


def test_a_checkpoint_format_is_one_folder():
    """Turns red when a format has to be declared outside of its folder, but for the list."""
    sources = {place for place in listed("Add a checkpoint format") if place.startswith("src/")}
    folders = {place.rpartition("/")[0] for place in sources if "/squeezellm/" in place}
    assert len(folders) == 1
    outside = {place for place in sources if "/squeezellm/" not in place}
    assert outside == {"src/quire/config/packed/settings.py"}


@pytest.mark.parametrize("heading", TOYS)
def test_a_toy_is_added_in_the_listed_places(heading: str, tmp_path: Path):
    """Turns red when a how-to no longer leads to a thing that works, or names too few files."""
    toy, copy = TOYS[heading], tmp_path / "src"
    places = {place.replace(toy.example, "toy") for place in listed(heading)}
    assert {*toy.inserted, *toy.added} <= places
    write_copy(toy, copy)
    with (tmp_path / "printed").open("wb") as printed:
        given = {number: printed.fileno() for number in (1, 2)}
        template = template_of("tests.how_to_child")
        child = template.start("tests.how_to_child:main", [str(copy), toy.check], given)
        status = Forked(child).wait()
    assert status == 0, (tmp_path / "printed").read_text()


def test_a_source_of_kv_is_named_in_two_places_of_the_source():
    assert len([p for p in listed("Add a source of K/V") if p.startswith("src/")]) == 2


class LongAnswersFirst(KeyedPolicy):
    """A toy made by the last how-to."""

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        return (-(group.request.params.max_tokens or 0), group.number)


def test_a_toy_policy_needs_a_key_alone():
    lengths = [4, 12]
    settings = {"scheduling_policy": f"{__name__}:LongAnswersFirst", "max_num_seqs": 1}
    with LLM(quiet=True, **settings) as llm:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = llm.generate(["import "] * 2, params, use_tqdm=False)
    ends = [output.metrics.last_token_ts for output in outputs if output.metrics is not None]
    assert ends[1] < ends[0]


def test_a_name_that_no_registry_has_is_refused():
    with pytest.raises(ConfigError, match="scheduling_policy"):
        EngineSettings(scheduling_policy="newest")

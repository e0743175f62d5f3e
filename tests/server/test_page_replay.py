"""A recording of a real run in a real browser, without an engine: texts, counts and boxes.

Both are optional: `apt-get install chromium`, and `pip install 'quire[page]'`. After a change of
the page, `QUIRE_WRITE_PAGE=1 python -m pytest tests/server/test_page_replay.py` writes
`tests/server/page/expected.json` and the pictures beside it: look at them before you commit them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tools.page_pictures import opened_browser, opened_page, served_page, show_frame

from tests.server.page_faults import PageFaults, serious_faults

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
if shutil.which("chromium") is None:
    pytest.skip("chromium is not installed", allow_module_level=True)

FOLDER = Path(__file__).parent / "page"
RECORDING = FOLDER / "recording.jsonl"
EXPECTED = FOLDER / "expected.json"
WRITES = bool(os.environ.get("QUIRE_WRITE_PAGE"))
FRAME = 24
SIZES = [(1280, 800), (390, 844)]
SCHEMES = ["light", "dark"]

READ = """() => [...document.querySelectorAll(
    '.figure, .card, .card h2, .card canvas, .request, .legend li, .facts > div, .queue li, '
    + '.prefixes li, .card .hint')].filter((each) => each.checkVisibility()).map((each) => {
  const { x, y, width, height } = each.getBoundingClientRect();
  const view = document.getElementById('engine');
  const text = each.matches('.card') ? '' : each.innerText.replace(/\\s+/g, ' ').trim();
  const name = each.className || each.tagName.toLowerCase();
  return [name, text, [x, y + view.scrollTop, width, height].map(Math.round)];
})"""
FONT = """() => {
  const context = document.createElement('canvas').getContext('2d');
  const style = getComputedStyle(document.body);
  return ['sans', 'mono'].map((kind) => {
    context.font = kind === 'mono' ? '13px ui-monospace, monospace' : style.font;
    return context.measureText('Quire 0123456789 ms, %').width;
  });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as found:
        yield found


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_page(RECORDING) as found:
        yield found


class Replay:
    """A page that stands at `FRAME`. `close` fails if it had faults."""

    def __init__(self, browser: Any, address: str, size: tuple[int, int], scheme: str) -> None:
        self.page: Any = opened_page(browser, size, scheme)
        self._faults = PageFaults(self.page, address.partition("/ui")[0])
        self.page.goto(f"{address}&frame={FRAME}")
        self.page.wait_for_selector(".replay:not([hidden])")

    def close(self) -> None:
        self.page.context.close()
        self._faults.check()


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in SCHEMES], ids=str)
def replay(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Replay]:
    size, scheme = request.param
    found = Replay(browser, address, size, scheme)
    yield found
    found.close()


def size_of(page: Any) -> str:
    return "{width}x{height}".format(**page.viewport_size)


def expected_of(page: Any) -> dict[str, Any]:
    if WRITES:
        kept = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
        kept[size_of(page)] = {"font": page.evaluate(FONT), "elements": page.evaluate(READ)}
        lines = json.dumps(kept, ensure_ascii=False).replace('], ["', '],\n["')
        EXPECTED.write_text(lines + "\n", encoding="utf-8")
        scheme = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        page.screenshot(path=FOLDER / f"{size_of(page)}-{'dark' if scheme else 'light'}.png")
    return json.loads(EXPECTED.read_text(encoding="utf-8"))[size_of(page)]


def test_texts_and_counts(replay: Replay) -> None:
    """Fault: a figure, a reason or a row is another one than it was."""
    wanted = [element[:2] for element in expected_of(replay.page)["elements"]]
    assert [element[:2] for element in replay.page.evaluate(READ)] == wanted


def test_boxes(replay: Replay) -> None:
    """Fault: a part moved, shrank, or covers another one."""
    wanted = expected_of(replay.page)
    if replay.page.evaluate(FONT) != pytest.approx(wanted["font"], abs=0.01):
        pytest.skip("this machine has other fonts than the expected boxes")
    boxes = [edge for element in replay.page.evaluate(READ) for edge in element[2]]
    assert boxes == pytest.approx([e for each in wanted["elements"] for e in each[2]], abs=1)


def test_nothing_is_wider_than_the_screen_and_the_map_is_painted(replay: Replay) -> None:
    page = replay.page
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getElementById('engine').scrollWidth") <= width
    clipped = page.evaluate(
        "() => [...document.querySelectorAll('.figure-value')]"
        ".filter((each) => each.scrollWidth > each.parentElement.clientWidth)"
        ".map((each) => each.textContent)"
    )
    assert not clipped
    for name, colours in ((".map", 6), (".ticks", 3)):
        painted = page.evaluate(
            "(name) => { const map = document.querySelector(name);"
            " const { data } = map.getContext('2d').getImageData(0, 0, map.width, map.height);"
            " return new Set(new Uint32Array(data.buffer)).size; }",
            name,
        )
        assert painted >= colours


def test_counts_are_those_of_the_recording(browser: Any, address: str) -> None:
    """Fault: the map, the queue or the tree shows other numbers than the engine told."""
    found = Replay(browser, address, SIZES[0], "light")
    page = found.page
    frames = page.evaluate(
        "async () => (await import('/ui/replay.js'))"
        ".framesOf(await (await fetch('/recording.jsonl')).text())"
    )
    for number in (0, 11, len(frames) - 1):
        show_frame(page, number)
        frame = frames[number]
        counts = {
            each.get_attribute("data-state"): int(each.get_attribute("data-count"))
            for each in page.query_selector_all("[data-count]")
        }
        wanted = dict.fromkeys("fcusp", 0)
        for letter, length in re.findall(r"([a-z])(\d+)", frame["blocks"]):
            wanted[letter] += int(length)
        assert counts == wanted and sum(counts.values()) == frame["engine"]["num_blocks"]
        evicted = page.locator("[data-evicted]").get_attribute("data-evicted")
        assert int(evicted) == len(frame["evicted"])
        waiting = sum("waits" in group for group in frame["groups"].values())
        told = " ".join(page.locator(".queue li").all_inner_texts())
        assert waiting == 0 or f"{waiting} wait" in told
        assert page.locator(".prefixes li").count() == max(1, len(frame["prefixes"]))
    found.close()


def test_whose_a_block_is(browser: Any, address: str) -> None:
    found = Replay(browser, address, SIZES[0], "light")
    page = found.page
    told = page.locator(".pointed").first
    seen = set()
    for x in range(10, 560, 22):
        page.locator(".map").hover(position={"x": x, "y": 30})
        seen.add(told.inner_text())
    owned = [text for text in seen if "held by request-" in text]
    assert owned and all(text.startswith("Block ") for text in seen)
    before = page.locator(".map").screenshot()
    page.locator(".request").first.focus()
    assert page.locator(".map").screenshot() != before, "the blocks of the request are framed"
    page.locator(".ticks").hover(position={"x": 500, "y": 90})
    assert "sequences: " in page.locator(".pointed").last.inner_text()
    page.locator(".request").first.click()
    page.wait_for_selector("#drawer[open] .life li")
    assert "It has run for" in page.locator("#drawer").inner_text()
    found.close()


def test_it_plays_to_its_end(browser: Any, address: str) -> None:
    found = Replay(browser, address, SIZES[0], "light")
    page = found.page
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector(".replay-time:has-text('(41 of')")
    page.wait_for_selector("text=Play")
    found.close()


def test_a_frame_is_laid_out_once(browser: Any, address: str) -> None:
    """Fault: the drawing asks for sizes and colours between its changes, and each answer lays out
    the whole page: three times a frame, and nine times for styles."""
    found = Replay(browser, address, SIZES[0], "light")
    page = found.page
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def count() -> dict[str, float]:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return {each["name"]: each["value"] for each in metrics}

    before = count()
    page.evaluate(
        "async () => { const slider = document.querySelector('.replay input');"
        " for (let i = 0; i < 30; i += 1) { slider.value = String(i);"
        " slider.dispatchEvent(new Event('input')); await new Promise(requestAnimationFrame); } }"
    )
    after = count()
    for name in ("LayoutCount", "RecalcStyleCount"):
        assert 10 < after[name] - before[name] <= 45
    found.close()


def test_the_keyboard_reaches_every_part_of_the_view(browser: Any, address: str) -> None:
    found = Replay(browser, address, SIZES[0], "light")
    page = found.page
    wanted = page.evaluate(
        "() => [...document.querySelectorAll('a, button, input, .figure, .table-box')].filter("
        "(each) => each.checkVisibility({ visibilityProperty: true }) && each.tabIndex >= 0)"
        ".map((each, i) => (each.dataset.reached = 'no', i)).length"
    )
    page.evaluate("document.activeElement.blur()")
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        page.evaluate("() => { document.activeElement.dataset.reached = 'yes'; }")
    assert page.locator("[data-reached=no]").count() == 0
    found.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_no_serious_fault(browser: Any, address: str, scheme: str) -> None:
    found = Replay(browser, address, SIZES[0], scheme)
    source = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    assert not serious_faults(found.page, source)
    found.page.locator(".request").first.click()
    found.page.wait_for_selector("#drawer[open] .life li")
    assert not serious_faults(found.page, source)
    found.page.evaluate(
        "document.querySelector('#drawer').append(document.createElement('button'))"
    )
    assert serious_faults(found.page, source), "a button without a name is one"
    found.close()


def test_a_recording_elsewhere_is_refused(browser: Any, address: str) -> None:
    found = Replay(browser, address, SIZES[0], "light")
    page = found.page
    page.goto(address.partition("?")[0] + "?replay=http://127.0.0.2:9/recording.jsonl")
    page.wait_for_selector(".banner:not([hidden])")
    assert "Give an address of this server" in page.locator(".banner").inner_text()
    found.close()

"""The page in a real browser: headless Chromium, by Playwright, over the engine in memory.

Both are optional: `apt-get install chromium`, and `pip install playwright`, which needs no browser
of its own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.config.settings import EngineSettings
from quire.config.startup import find_model
from quire.engine.model_front import ModelFront, load_model_front
from quire.server.settings import ServerSettings
from tests import waiting
from tests.image_writer import as_bytes, picture, write_vision_checkpoint
from tests.server.in_memory import InMemoryClient, RealClient
from tests.server.page_faults import PageFaults, serious_faults
from tests.server.running import RunningServer, running_server
from tests.server.scripted import END, Script, hermes_front

playwright: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)

KEY = "the-key-of-the-page-0123456789"
PATIENCE_MS = 60_000
SIZES = [(1280, 800), (390, 844)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    """A model that thinks and calls tools."""
    return hermes_front(tmp_path_factory.mktemp("hermes"))


@pytest.fixture(scope="module")
def server(front: ModelFront) -> Iterator[RunningServer]:
    with running_server(front) as found:
        yield found


class Viewer:
    """A page in a fresh profile. `close` fails if it wrote an error to the console, or asked
    another host for anything."""

    def __init__(self, browser: Any, url: str, size: tuple[int, int], scheme: str) -> None:
        width, height = size
        self._context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self._context.set_default_timeout(PATIENCE_MS)
        self.page: Any = self._context.new_page()
        self._faults = PageFaults(self.page, url)

    @property
    def faults(self) -> list[str]:
        return self._faults.found

    def close(self) -> None:
        self._context.close()
        self._faults.check()


@pytest.fixture
def viewer(browser: Any, server: RunningServer) -> Iterator[Viewer]:
    found = Viewer(browser, server.url, SIZES[0], "light")
    found.page.goto(f"{server.url}/")
    found.page.wait_for_selector("#state[data-state=ready]")
    yield found
    found.close()
    server.wait_until_idle()


def set_field(page: Any, label: str, value: str) -> None:
    """Fill in a field of the panel, and close it."""
    page.get_by_role("button", name="Parameters", exact=True).click()
    page.locator(".panel").get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Close the parameters").click()


def send(page: Any, text: str) -> Any:
    """Send a message, and return the answer's element when it has ended."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return ended(page)


def ended(page: Any) -> Any:
    page.wait_for_selector(".assistant[aria-busy=false] >> nth=-1")
    page.wait_for_selector(".send:not(.stop)")
    return page.locator(".assistant").last


def test_a_round_trip(viewer: Viewer, script: Script) -> None:
    """Fault: an answer is not shown, or not as its markdown says."""
    page = viewer.page
    seed = script.tell(f"Three:\n\n- **one**\n- `two`\n\n```python\nprint(3)\n```\n{END}")
    set_field(page, "Seed", str(seed))
    answer = send(page, "Count.")
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("strong").inner_text() == "one"
    assert answer.locator(".code code").inner_text().strip() == "print(3)"
    assert "tokens" in answer.locator(".figures").inner_text()
    answer.get_by_role("button", name="How the request went").click()
    page.wait_for_selector("#drawer[open] .life li")
    assert "The engine wrote the answer" in page.locator("#drawer").inner_text()
    page.keyboard.press("Escape")
    page.reload()
    assert page.locator(".assistant li").all_inner_texts() == ["one", "two"], "it was kept"


def test_branches(viewer: Viewer, script: Script) -> None:
    page = viewer.page
    for number, text in enumerate(("First.", "Second.")):
        set_field(page, "Seed", str(script.tell(text + END)))
        if number:
            page.get_by_role("button", name="Regenerate the answer").click()
            answer = ended(page)
        else:
            answer = send(page, "Say a number.")
        assert answer.locator(".markdown").inner_text() == text
    assert page.locator(".assistant .branches").inner_text() == "2/2"
    page.locator(".assistant").get_by_role("button", name="Previous branch").click()
    assert page.locator(".assistant .markdown").inner_text() == "First."
    set_field(page, "Seed", str(script.tell(f"Third.{END}")))
    page.get_by_role("button", name="Edit the message").click()
    page.locator(".edit-area").fill("Say another one.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".user .branches")
    assert ended(page).locator(".markdown").inner_text() == "Third."
    assert page.locator(".user .branches").inner_text() == "2/2"


def test_thinking_and_a_tool_call_answered_by_hand(viewer: Viewer, script: Script) -> None:
    page = viewer.page
    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'
    set_field(page, "Seed", str(script.tell(f"<think>\nHm.\n</think>\n\n{call}{END}")))
    page.get_by_role("button", name="Parameters", exact=True).click()
    page.get_by_role("button", name="Example / clear").last.click()
    page.get_by_role("button", name="Close the parameters").click()
    answer = send(page, "How is it in Ulm?")
    assert answer.locator("summary").inner_text().startswith("Thought for")
    assert "Hm." in (answer.locator(".thought-text").text_content() or "")
    assert "Tool call: weather" in answer.inner_text() and '"Ulm"' in answer.inner_text()
    set_field(page, "Seed", str(script.tell(f"<think>\n\n</think>\n\nIt rains.{END}")))
    answer.get_by_label("Result").fill("rain")
    answer.get_by_role("button", name="Send the result").click()
    page.wait_for_selector(".assistant >> nth=1")
    assert ended(page).locator(".markdown").inner_text() == "It rains."
    assert "rain" in page.locator(".result").inner_text()


def test_an_answer_by_a_schema(viewer: Viewer, script: Script) -> None:
    page = viewer.page
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    set_field(page, "JSON schema of answers", json.dumps({**schema, "additionalProperties": False}))
    set_field(page, "Seed", str(script.tell(f'{{"n": 7}}{END}')))
    answer = send(page, "A number.")
    assert answer.locator(".good").inner_text() == "Matches the schema"


def test_probabilities_of_tokens(viewer: Viewer, script: Script) -> None:
    page = viewer.page
    set_field(page, "Seed", str(script.tell(f"A few words.{END}")))
    page.get_by_role("button", name="Parameters", exact=True).click()
    page.get_by_label("Token probabilities").check()
    page.get_by_role("button", name="Close the parameters").click()
    answer = send(page, "Say something.")
    answer.get_by_role("button", name="Token probabilities").click()
    token = answer.locator(".token").first
    token.focus()
    assert token.locator(".token-card tr").count() >= 2
    assert "%" in token.locator(".token-card").inner_text()


def test_an_answer_that_waits_says_where_to_see_why(browser: Any, front: ModelFront) -> None:
    """Fault: while others run, the chat shows an empty answer without a word."""
    client = InMemoryClient(step_s=0.2)
    client.paused = True
    with running_server(front, client=client) as server:
        viewer = Viewer(browser, server.url, SIZES[1], "light")
        page = viewer.page
        page.goto(f"{server.url}/")
        page.get_by_label("Message", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="See what the request waits for").click()
        page.wait_for_selector(".request")
        page.get_by_role("link", name="Chat", exact=True).click()
        client.paused = False
        page.wait_for_selector(".assistant[aria-busy=true] .markdown:not(:empty)")
        assert not page.get_by_text("No token yet").count()
        page.locator(".send.stop").click()
        ended(page)
        viewer.close()
    client.engine.core.shutdown()


def test_stop(browser: Any, front: ModelFront) -> None:
    """Fault: an answer that the reader stopped goes on in the engine, or is lost."""
    client = InMemoryClient(step_s=0.2)
    with running_server(front, client=client) as server:
        viewer = Viewer(browser, server.url, SIZES[0], "light")
        page = viewer.page
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#state[data-state=ready]")
        page.get_by_label("Message", exact=True).fill("Go on.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".assistant.open")
        server.wait_until_open()
        page.get_by_role("button", name="Stop").click()
        assert "You stopped it." in ended(page).inner_text()
        server.wait_until_idle()
        viewer.close()
    client.engine.core.shutdown()


def test_hostile_output_is_text(viewer: Viewer, script: Script) -> None:
    """Fault: a model's output runs, leads somewhere, hides what it says, or stalls the page."""
    page = viewer.page
    text = (
        '<img src=x onerror="document.title=1"> [go](javascript:document.title=1) \x1b[31m\u202eabc'
    )
    set_field(page, "Seed", str(script.tell(text + END)))
    answer = send(page, "Be evil.")
    shown = answer.locator(".markdown").inner_text()
    assert '<img src=x onerror="document.title=1">' in shown and "␛[31m[U+202E]abc" in shown
    assert not answer.locator("img, .markdown a").count() and page.title() == "quire"
    long = {"id": "m2", "parent": "m1", "role": "assistant", "content": "x" * 1_000_000}
    asked = {"id": "m1", "parent": None, "role": "user", "content": "<script>alert(1)</script>"}
    talk = {"id": "t", "title": "long", "last": "m2", "messages": {"m1": asked, "m2": long}}
    file = {"name": "talk.json", "mimeType": "application/json"}
    page.get_by_label("File of conversations").set_input_files(
        {**file, "buffer": json.dumps(talk).encode()}
    )
    page.wait_for_selector(".assistant:has-text('Show 940,000 more characters')")
    again = {**file, "buffer": json.dumps(talk).encode()}
    page.get_by_label("File of conversations").set_input_files(again)
    page.wait_for_selector(".toast >> nth=1")
    assert page.get_by_role("button", name="long", exact=True).count() == 1, "it replaced itself"
    assert page.locator(".user-text").inner_text() == "<script>alert(1)</script>"
    assert page.locator("script").count() == 1, "the page's own"


def test_the_key_is_asked_for_and_stays_in_the_tab(browser: Any, front: ModelFront) -> None:
    settings = ServerSettings(api_key=(KEY,), disable_access_log=True)
    with running_server(front, settings) as server:
        viewer = Viewer(browser, server.url, SIZES[0], "light")
        page = viewer.page
        page.goto(f"{server.url}/ui")
        page.get_by_label("Key", exact=True).fill("no-header-takes-this-é")
        page.keyboard.press("Enter")
        assert page.evaluate("sessionStorage.length") == 0 and page.locator("#key[open]").count()
        page.get_by_label("Key", exact=True).fill("a-wrong-one")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-error:not([hidden])")
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#state[data-state=ready]")
        assert send(page, "Hello.").locator(".figures").inner_text()
        kept = page.evaluate("[location.href, document.cookie, JSON.stringify(localStorage)]")
        assert not any(KEY in each for each in kept)
        page.reload()
        page.wait_for_selector("#state[data-state=ready]")
        viewer.close()


def test_the_engine_view_shows_what_metrics_say(
    viewer: Viewer, server: RunningServer, script: Script
) -> None:
    page = viewer.page
    send(page, "Something that fills a few blocks. " * 8)
    server.wait_until_idle()
    page.get_by_role("link", name="Engine").click()
    page.wait_for_selector(".request[data-over=true]")
    stats = server.call(lambda: server.client.stats)
    assert stats.num_cached_blocks > 0
    page.wait_for_selector(f".legend li[data-state=c][data-count='{stats.num_cached_blocks}']")
    counts = [
        int(each.get_attribute("data-count")) for each in page.query_selector_all("[data-count]")
    ]
    assert sum(counts) == stats.num_blocks
    painted = page.evaluate(
        "() => { const map = document.querySelector('.map');"
        " const { data } = map.getContext('2d').getImageData(0, 0, map.width, map.height);"
        " return new Set(new Uint32Array(data.buffer)).size; }"
    )
    assert painted >= 3, "free and cached blocks, and the ground between them"
    page.locator(".request").first.click()
    page.wait_for_selector("#drawer[open] .life li")
    assert "It took" in page.locator("#drawer").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("#drawer:not([open])", state="attached")


def test_a_recording_is_saved_and_played(
    viewer: Viewer, server: RunningServer, tmp_path: Path
) -> None:
    """Fault: a recording shows other figures than the engine had."""
    page = viewer.page
    send(page, "Something.")
    server.wait_until_idle()
    page.get_by_role("link", name="Engine").click()
    page.wait_for_selector(".request[data-over=true]")
    rows = page.locator(".request").count()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save a recording").click()
    path = tmp_path / "engine.jsonl"
    saved.value.save_as(path)
    first, *changes = map(json.loads, path.read_text().splitlines())
    old = {**first, "requests": {}, "at": first["at"] - 1.0}
    path.write_text("\n".join(map(json.dumps, [old, first, *changes])))
    page.get_by_label("File of a recording").set_input_files(path)
    page.wait_for_selector(".replay:not([hidden])")
    page.get_by_label("Place in the recording").fill("0")
    assert page.locator(".request").count() == 0, "before the first request"
    page.get_by_label("Place in the recording").fill(str(len(changes) + 1))
    assert page.locator(".request").count() == rows
    page.get_by_role("button", name="Back to the engine").click()
    page.wait_for_selector(".replay", state="hidden")
    assert page.locator(".request").count() == rows


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_fits_the_screen(
    browser: Any, server: RunningServer, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    """Fault: something is wider than a phone, or two themes look the same."""
    viewer = Viewer(browser, server.url, size, scheme)
    page = viewer.page
    for view in ("chat", "engine"):
        page.goto(f"{server.url}/ui#{view}")
        page.wait_for_selector("#state[data-state=ready]")
        page.screenshot(path=tmp_path / f"{view}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert (
            page.evaluate("document.getElementById(location.hash.slice(1)).scrollWidth") <= size[0]
        )
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 380
    assert light == (scheme == "light")
    viewer.close()


def test_the_keyboard_reaches_everything(viewer: Viewer, script: Script) -> None:
    page = viewer.page
    set_field(page, "Seed", str(script.tell(f"Yes.{END}")))
    send(page, "Is it?")
    wanted = page.evaluate(
        "() => [...document.querySelectorAll('a, button, select, textarea, summary, input')]"
        ".filter((each) => each.checkVisibility() && each.tabIndex >= 0).length"
    )
    page.evaluate("document.activeElement.blur()")
    reached: set[int] = set()
    for _ in range(3 * wanted):
        page.keyboard.press("Tab")
        index = page.evaluate(
            "() => [...document.querySelectorAll('*')].indexOf(document.activeElement)"
        )
        reached.add(index)
    missed = page.evaluate(
        "(reached) => [...document.querySelectorAll('*')].map((each, i) => [each, i])"
        ".filter(([each, i]) => each.matches('a, button, select, textarea, summary, input')"
        " && each.checkVisibility({ visibilityProperty: true }) && each.tabIndex >= 0"
        " && !reached.includes(i)).map(([each]) => each.outerHTML.slice(0, 120))",
        sorted(reached),
    )
    assert not missed
    page.keyboard.press("/")
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('button, input, textarea, select')]"
        ".filter((each) => !(each.ariaLabel || each.labels?.length || each.textContent.trim()))"
        ".map((each) => each.outerHTML.slice(0, 120))"
    )
    assert not unnamed


def test_the_focus_stays_where_the_keyboard_left_it(viewer: Viewer, script: Script) -> None:
    page = viewer.page
    focused = "(document.activeElement.closest('.messages') ?? document.activeElement)"
    set_field(page, "Seed", str(script.tell(f"One.{END}")))
    send(page, "Say it.")
    set_field(page, "Seed", str(script.tell(f"Two.{END}")))
    page.get_by_role("button", name="Regenerate the answer").press("Enter")
    ended(page)
    assert page.evaluate(f"{focused}.className") == "messages"
    for name in ("Previous branch", "Edit the message", "Parameters"):
        page.get_by_role("button", name=name, exact=True).press("Enter")
        if name != "Previous branch":
            page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.ariaLabel") == name
    assert page.locator(".panel").is_hidden() and page.locator(".edit-form").count() == 0


def test_images(browser: Any, tmp_path: Path) -> None:
    """Fault: an image is not sent, not shown again, or offered to a model that takes none."""
    folder = write_vision_checkpoint(tmp_path)
    settings = EngineSettings(model=str(folder))
    found = find_model(settings)
    vision = load_model_front(settings, found.folder, found.spec)
    with (
        LLM(str(folder), quiet=True, dtype="float32", num_kv_blocks=256, max_model_len=512) as llm,
        running_server(vision, client=RealClient(llm)) as server,
    ):
        viewer = Viewer(browser, server.url, SIZES[0], "light")
        page, posted = viewer.page, list[str]()
        page.on("request", lambda request: posted.append(request.post_data or ""))
        page.goto(f"{server.url}/ui")
        page.get_by_role("button", name="Attach an image").wait_for()
        set_field(page, "Longest answer", "4")
        file = page.get_by_label("File of an image")
        data = {"name": "a.png", "mimeType": "image/png"}
        file.set_input_files({**data, "buffer": b"no image"})
        page.wait_for_selector(".toast:has-text('a.png is not an image')")
        file.set_input_files({**data, "buffer": as_bytes(picture(100, 70))})
        file.set_input_files({**data, "buffer": as_bytes(picture(40, 70))})
        page.get_by_role("button", name="Remove image 2").click()
        assert page.locator(".attachments .thumb").count() == 1
        answer = send(page, "What is it?")
        assert "4 tokens" in answer.locator(".figures").inner_text()
        (body,) = [json.loads(each) for each in posted if '"messages"' in each]
        image, text = body["messages"][0]["content"]
        assert image["image_url"]["url"].startswith("data:image/png;base64,")
        assert text == {"type": "text", "text": "What is it?"}
        page.reload()
        shown = page.locator(".sent canvas[width='100'][height='70']")
        shown.wait_for()
        viewer.close()


def test_no_image_for_a_model_of_texts(viewer: Viewer) -> None:
    """Fault: an image is dropped without a word, or the browser leaves the page for it."""
    page = viewer.page
    assert page.get_by_role("button", name="Attach an image").count() == 0
    page.wait_for_selector(".model option", state="attached")
    for kind in ("paste", "drop"):
        page.evaluate(
            "(kind) => { const data = new DataTransfer();"
            " data.items.add(new File(['x'], 'x.png', { type: 'image/png' }));"
            " const made = { bubbles: true, cancelable: true };"
            " const target = document.querySelector(kind === 'drop' ? '.messages' : '#composer');"
            " const event = kind === 'drop' ? new DragEvent(kind, { ...made, dataTransfer: data })"
            " : new ClipboardEvent(kind, { ...made, clipboardData: data });"
            " if (target.dispatchEvent(event)) throw new Error('the browser takes it'); }",
            kind,
        )
    assert page.locator(".toast:has-text('takes no images')").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_the_chat(
    browser: Any, server: RunningServer, script: Script, scheme: str
) -> None:
    package = pytest.importorskip("axe_playwright_python", reason="its package is missing")
    axe = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    viewer = Viewer(browser, server.url, SIZES[0], scheme)
    page = viewer.page
    page.goto(f"{server.url}/ui")
    page.wait_for_selector("#state[data-state=ready]")
    assert not serious_faults(page, axe)
    set_field(page, "Seed", str(script.tell(f"**One** `two`\n\n```py\n3\n```\n{END}")))
    send(page, "Count.")
    page.get_by_role("button", name="Parameters", exact=True).click()
    assert not serious_faults(page, axe)
    viewer.close()


def test_a_foreign_page_reads_nothing(browser: Any, server: RunningServer) -> None:
    """Fault: a page of another site reads what the page shows, or posts a chat."""
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        reply = waiting.get(f"{server.url}/ui/api/snapshot", headers=headers)
        assert "access-control-allow-origin" not in reply.headers
        assert reply.status_code == (403 if "host" in headers else 200)
    viewer = Viewer(browser, server.url, SIZES[0], "light")
    page = viewer.page
    page.goto("data:text/html,<title>evil</title>")
    read = page.evaluate(
        "(url) => fetch(url + '/ui/api/snapshot').then(() => 'read', () => 'refused')", server.url
    )
    assert read == "refused"
    viewer.faults.clear()  # the refusal is an error of the console
    viewer.close()


def test_a_newcomer_learns_what_the_bundled_model_is(browser: Any, server: RunningServer) -> None:
    """Fault: the first question on the page is one that this model cannot answer."""
    viewer = Viewer(browser, server.url, SIZES[1], "light")
    page = viewer.page
    page.goto(f"{server.url}/")
    page.wait_for_selector(".model-hint:has-text('very small')")
    assert "What can you do?" in page.locator(".ideas").inner_text()
    viewer.close()


def test_a_schema_that_is_none_loses_nothing(viewer: Viewer, script: Script) -> None:
    """Fault: a message is sent into nothing, or the reader does not see what shapes the answers."""
    page = viewer.page
    set_field(page, "JSON schema of answers", '{"type": "obj')
    assert page.locator(".set").inner_text() == "Set: schema"
    page.get_by_label("Message", exact=True).fill("A number.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".panel .error:not([hidden])")
    assert page.locator(".user").count() == 0
    assert page.get_by_label("Message", exact=True).input_value() == "A number."
    field = page.get_by_label("JSON schema of answers", exact=True)
    assert field.evaluate("(each) => each === document.activeElement")
    field.fill("")
    page.get_by_role("button", name="Close the parameters").click()
    set_field(page, "Seed", str(script.tell(f"Seven.{END}")))
    page.get_by_label("Message", exact=True).press("Enter")
    assert ended(page).locator(".markdown").inner_text() == "Seven."
    assert "tokens/s" not in page.locator(".figures").inner_text(), "it came all at once"


def test_a_reload_in_the_middle_keeps_what_came(browser: Any, front: ModelFront) -> None:
    client = InMemoryClient(step_s=0.1)
    with running_server(front, client=client) as server:
        viewer = Viewer(browser, server.url, SIZES[0], "light")
        page = viewer.page
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#state[data-state=ready]")
        page.get_by_label("Message", exact=True).fill("Go on.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".assistant.open .markdown:not(:empty)")
        page.reload()
        answer = ended(page)
        assert answer.locator(".markdown").inner_text()
        assert "The page was left before the answer ended." in answer.inner_text()
        server.wait_until_idle()
        (row,) = waiting.get(f"{server.url}/admin/requests").json()["requests"]
        assert row["error"] == "The client left before the answer ended."
        viewer.close()
    client.engine.core.shutdown()


def test_a_server_that_goes_away_is_told(browser: Any, front: ModelFront) -> None:
    """Fault: the page says "ready" beside a server that is gone, or "Failed to fetch"."""
    client = InMemoryClient()
    with running_server(front, client=client) as server:
        viewer = Viewer(browser, server.url, SIZES[0], "light")
        page = viewer.page
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#state[data-state=ready]")
        page.context.set_offline(True)
        assert "The server does not answer." in send(page, "Is it there?").inner_text()
        page.wait_for_selector("#state[data-state=unreachable]")
        page.get_by_role("link", name="Engine").click()
        page.wait_for_selector(".banner:has-text('The page asks again every 2 s')")
        page.context.set_offline(False)
        page.wait_for_selector(".banner", state="hidden")
        page.wait_for_selector("#state[data-state=ready]")
        viewer.faults.clear()  # each try is an error of the console
        viewer.close()
    client.engine.core.shutdown()


def test_the_queue_leads_to_each_request(browser: Any, front: ModelFront) -> None:
    """Fault: a name in the queue or in an explanation leads nowhere; rows are left out unsaid."""
    client = InMemoryClient()
    client.paused = True
    with running_server(front, client=client) as server, ThreadPoolExecutor(30) as pool:
        body = {"model": "bundled", "prompt": "Hello", "max_tokens": 4}
        posts = [
            pool.submit(
                waiting.post, f"{server.url}/v1/completions", json={**body, "request_id": f"r-{i}"}
            )
            for i in range(30)
        ]
        viewer = Viewer(browser, server.url, SIZES[1], "dark")
        page = viewer.page
        page.goto(f"{server.url}/ui#engine")
        page.wait_for_selector("text=6 more run or wait.")
        page.locator(".queue .name").first.click()
        page.wait_for_selector("#drawer[open] .why li")
        assert page.locator(".request-name").inner_text().startswith("r-")
        page.keyboard.press("Escape")
        client.paused = False
        assert all(each.result().status_code == 200 for each in posts)
        viewer.close()
    client.engine.core.shutdown()

"""Pictures of the page from a recording, without an engine.

    quire serve --record-ui engine.jsonl       # in the meantime, send it requests
    python -m tools.page_pictures engine.jsonl --picture docs/plots/page.png --frame 40
    python -m tools.page_pictures engine.jsonl --animation docs/plots/page.gif

This needs Debian's `chromium`, `playwright` (`pip install 'quire[page]'`), and for an animation
`pillow`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from quire.server.routes.page import FILE_HEADERS, FILES, MEDIA, UI_FOLDER

RECORDING = "/recording.jsonl"
SECONDS, FRAMES_PER_S = 10, 4
COLOURS = 64
PATIENCE_MS = 60_000


@contextlib.contextmanager
def served_page(recording: Path) -> Iterator[str]:
    """Serve the page's files and one recording, nothing else; give the address of the replay."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = "index.html" if path == "/ui" else path.removeprefix("/ui/")
            if path == RECORDING:
                self._send(recording.read_bytes(), "application/json")
            elif name in FILES:
                data = (UI_FOLDER / name).read_bytes()
                self._send(data, MEDIA[Path(name).suffix], FILE_HEADERS)
            else:
                self.send_error(404)

        def _send(self, data: bytes, media: str, headers: dict[str, str] | None = None) -> None:
            self.send_response(200)
            for key, value in {**(headers or {}), "content-type": media}.items():
                self.send_header(key, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing for each request."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/ui?replay={RECORDING}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def opened_browser() -> Iterator[Any]:
    """Give a headless Chromium, by Playwright. SystemExit without one of them."""
    try:
        playwright: Any = importlib.import_module("playwright.sync_api")
    except ImportError:
        raise SystemExit("playwright is missing: pip install 'quire[page]'") from None
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("chromium is missing: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def opened_page(browser: Any, size: tuple[int, int], scheme: str, scale: float = 1.0) -> Any:
    """Return a page with a fixed language and clock zone, so that texts are the same everywhere."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        device_scale_factor=scale,
        locale="en-GB",
        timezone_id="UTC",
        reduced_motion="reduce",
    )
    context.set_default_timeout(PATIENCE_MS)
    return context.new_page()


def show_frame(page: Any, number: int) -> None:
    """Move the slider of a replay to a frame."""
    page.get_by_label("Place in the recording").fill(str(number))


def _take_picture(address: str, options: argparse.Namespace) -> None:
    with opened_browser() as browser:
        page = opened_page(browser, (options.width, options.height), options.scheme, 1.5)
        page.goto(f"{address}&frame={options.frame}")
        page.wait_for_selector(".replay:not([hidden])")
        page.screenshot(path=options.picture)


def _take_animation(address: str, options: argparse.Namespace) -> None:
    from PIL import Image

    images: list[Any] = []
    with opened_browser() as browser:
        page = opened_page(browser, (options.width, options.height), options.scheme)
        page.goto(f"{address}&frame={options.frame}")
        page.wait_for_selector(".replay:not([hidden])")
        for number in range(options.frame, options.frame + SECONDS * FRAMES_PER_S):
            show_frame(page, number)
            image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            images.append(image)
    palette = images[len(images) // 2].quantize(COLOURS)
    drawn = [image.quantize(COLOURS, palette=palette, dither=Image.Dither.NONE) for image in images]
    drawn[0].save(
        options.animation,
        save_all=True,
        append_images=drawn[1:],
        duration=1000 // FRAMES_PER_S,
        loop=0,
        optimize=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recording", type=Path, help="file of --record-ui, or one that was saved")
    parser.add_argument("--picture", type=Path, help="PNG file to write")
    parser.add_argument("--animation", type=Path, help="GIF file of ten seconds to write")
    parser.add_argument("--frame", type=int, default=0, help="number of the (first) frame")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    options = parser.parse_args()
    if options.picture is None and options.animation is None:
        parser.error("give --picture or --animation")
    with served_page(options.recording) as address:
        if options.picture is not None:
            _take_picture(address, options)
        if options.animation is not None:
            _take_animation(address, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

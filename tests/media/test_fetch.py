"""Images by URL: from listed hosts alone, at global addresses, within bounds of bytes and time."""

from __future__ import annotations

import asyncio
import http.server
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import waiting
from tests.image_writer import QWEN_PROCESSOR, as_bytes, picture

from quire.base.errors import RequestError
from quire.config.hf import RawConfig
from quire.config.media.qwen_vl import read_qwen2_5
from quire.server.generation.prompts import FETCHES_TOGETHER, PromptRenderer
from quire.server.requests.limits import Limits
from quire.text.rendering.media.fetch import MAX_LOOKUPS, ImageFetcher, global_addresses
from quire.text.rendering.media.images import FETCH_THREADS, ImageBounds, ImageRenderer
from quire.text.rendering.media.sources import ImageSource, MediaAccess

PLACE = "messages[0].content[0].image_url.url"
HOST = "images.example"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    def do_GET(self) -> None:
        self.server.paths.append((self.path, self.headers["Host"]))  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            while not self.server.is_over.wait(0.05):  # type: ignore[attr-defined]
                self.wfile.write(b"x")
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b"x" * 65_536)
        elif self.path == "/large":
            self.send_response(200)
            self.send_header("Content-Length", str(10**10))
            self.end_headers()
        elif self.path == "/image":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"bytes of an image")
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.paths: list[tuple[str, str]] = []
        self.is_over = threading.Event()

    def handle_error(self, *_: object) -> None:
        """A reader that has left is no fault."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.is_over.set()
        found.shutdown()
        thread.join()


def here(_host: str, _port: int) -> Sequence[str]:
    """Lead all names to this machine."""
    return ["127.0.0.1"]


def fetcher(server: Server, *hosts: str, timeout_s: float = 30.0) -> ImageFetcher:
    port = server.server_address[1]
    listed = [f"{host}:{port}" for host in (HOST, *hosts)]
    return ImageFetcher(listed, 10**6, here, timeout_s)


def url(server: Server, path: str, host: str = HOST) -> str:
    return f"http://{host}:{server.server_address[1]}{path}"


def test_the_bytes_of_a_listed_host(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment is not asked, and the host keeps its name."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert fetcher(server)(url(server, "/image"), PLACE) == b"bytes of an image"
    assert server.paths == [("/image", f"{HOST}:{server.server_address[1]}")]


def test_redirects_are_followed_within_the_rules(server: Server) -> None:
    fetch, target = fetcher(server), url(server, "/image")
    assert fetch(url(server, f"/to/{target}"), PLACE) == b"bytes of an image"
    assert fetch(url(server, "/to//image"), PLACE) == b"bytes of an image"
    four = target
    for _ in range(4):
        four = url(server, f"/to/{four}")
    with pytest.raises(RequestError, match="redirected more than 3 times"):
        fetch(four, PLACE)
    for other, words in (
        ("http://169.254.169.254/latest", "allowed_media_domains"),
        (url(server, "/image", "elsewhere.example"), "allowed_media_domains"),
        (f"file://{HOST}/etc/passwd", "no plain http"),
    ):
        with pytest.raises(RequestError, match=words):
            fetch(url(server, f"/to/{other}"), PLACE)


@pytest.mark.parametrize("path", ["/large", "/endless"])
def test_no_more_bytes_than_allowed(server: Server, path: str) -> None:
    with pytest.raises(RequestError, match=rf"{HOST}.*1000000"):
        fetcher(server)(url(server, path), PLACE)


def test_no_longer_than_the_deadline(server: Server) -> None:
    """A host that sends a byte now and then, and one that says nothing."""
    with pytest.raises(RequestError, match=r"it took over 1 s"):
        fetcher(server, timeout_s=1.0)(url(server, "/slow"), PLACE)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        fetch = ImageFetcher([f"{HOST}:{port}"], 10**6, here, 1.0)
        with pytest.raises(RequestError, match=r"it took over 1 s"):
            fetch(f"http://{HOST}:{port}/", PLACE)


def test_a_name_that_is_never_answered_ends_with_the_deadline() -> None:
    """Fault: the system's resolver waits as long as it likes. Names that are stuck take no more
    than `MAX_LOOKUPS` threads, and none of them for longer than the resolver."""
    may_end, asked = threading.Event(), list[str]()

    def stuck(host: str, _port: int) -> Sequence[str]:
        asked.append(host)
        assert may_end.wait(60)
        return ["127.0.0.1"]

    fetch = ImageFetcher([HOST], 10**6, stuck, 0.05)
    started = time.monotonic()
    try:
        for _ in range(MAX_LOOKUPS + 3):
            with pytest.raises(RequestError, match=r"cannot be read \(it took over 0\.05 s\)"):
                fetch(f"http://{HOST}/", PLACE)
        assert time.monotonic() - started < 30
        waiting.wait_for(lambda: len(asked) == MAX_LOOKUPS, "look-ups of the threads")
    finally:
        may_end.set()
    waiting.wait_for(lambda: fetch._lookups._value == MAX_LOOKUPS, "end of the look-ups")


def test_a_resolver_that_fails_is_told() -> None:
    def unknown(_host: str, _port: int) -> Sequence[str]:
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(RequestError, match="Name or service not known"):
        ImageFetcher([HOST], 10**6, unknown)(f"http://{HOST}/", PLACE)


def test_a_look_up_without_a_thread_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a system without threads takes all places for good."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fetch = ImageFetcher([HOST], 10**6, here)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RequestError, match="cannot be looked up: can't start new thread"):
        fetch(f"http://{HOST}/", PLACE)
    assert fetch._lookups._value == MAX_LOOKUPS


def test_a_watch_without_a_thread_leaves_no_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a system without threads keeps a connection for each image, and the error has no
    reason."""
    start, dial, dialled = threading.Thread.start, socket.create_connection, list[socket.socket]()

    def refuse(thread: threading.Thread) -> None:
        if isinstance(thread, threading.Timer):
            raise RuntimeError("can't start new thread")
        start(thread)

    def noted(*given: Any, **more: Any) -> socket.socket:
        dialled.append(dial(*given, **more))
        return dialled[-1]

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(socket, "create_connection", noted)
    with pytest.raises(RequestError, match="cannot be asked: can't start new thread"):
        fetcher(server)(url(server, "/image"), PLACE)
    assert [each.fileno() for each in dialled] == [-1]


def test_the_deadline_ends_slow_hosts_of_https_too(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fault: TLS takes the socket over, and the watch shuts one that is empty."""
    names = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", names[0],
         "-out", names[1], "-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(names[1], names[0])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", names[1])
    dial, port = socket.create_connection, server.server_address[1]
    monkeypatch.setattr(
        socket, "create_connection", lambda at, timeout: dial((at[0], port), timeout)
    )
    assert ImageFetcher([HOST], 10**6, here)(f"https://{HOST}/image", PLACE) == b"bytes of an image"
    assert server.paths == [("/image", HOST)], "signed URLs cover the name without the usual port"
    end = threading.Timer(40.0, server.is_over.set)
    end.start()
    with pytest.raises(RequestError, match=r"it took over 1 s"):
        ImageFetcher([HOST], 10**6, here, 1.0)(f"https://{HOST}/slow", PLACE)
    end.cancel()
    assert not server.is_over.is_set(), "the host ended it, and not the watch"


def test_what_is_not_there(server: Server) -> None:
    with pytest.raises(RequestError, match="the host answers 404"):
        fetcher(server)(url(server, "/none"), PLACE)


@pytest.mark.parametrize(
    "bad",
    [
        "http://user@images.example/a",
        "http://images.example\\@evil.example/a",
        "http://images.example:80 /a",
        "http://images.example:x/a",
        "http:///a",
        "ftp://images.example/a",
        "http://bücher.example/a",
    ],
)
def test_odd_urls(bad: str) -> None:
    with pytest.raises(RequestError, match=r"image_url\.url"):
        ImageFetcher([HOST, "bücher.example"], 10**6, here)(bad, PLACE)


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.0.0.1"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:10.0.0.1"],
        ["64:ff9b::a9fe:a9fe"],
        ["2002:a00:1::"],
        ["fe80::1%2"],
        ["fec0::1"],
        ["::7f00:1"],
        ["64:ff9b:1::a9fe:a9fe"],
        ["224.0.0.1"],
        ["0.0.0.0"],
        ["93.184.216.34", "192.168.0.1"],
        [],
    ],
    ids=str,
)
def test_every_address_must_be_global(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: one bad address among good ones is dialled when the good one does not answer."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 80)) for each in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(OSError, match=r"not a global one|no address"):
        global_addresses(HOST, 80)
    with pytest.raises(RequestError, match="cannot be read"):
        ImageFetcher([HOST], 10**6)(f"http://{HOST}/a.png", PLACE)


def test_global_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 80)) for each in
             ("93.184.216.34", "2606:2800:220:1::1")]  # fmt: skip
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert global_addresses(HOST, 80) == ["93.184.216.34", "2606:2800:220:1::1"]


def test_a_name_is_resolved_once_for_each_hop(server: Server) -> None:
    """Fault: a name that leads elsewhere when it is asked again."""
    asked: list[str] = []

    def rebinding(host: str, _port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

    port = server.server_address[1]
    fetch = ImageFetcher([f"{HOST}:{port}"], 10**6, rebinding)
    assert fetch(url(server, "/image"), PLACE) == b"bytes of an image"
    assert asked == [HOST]


class Together:
    """A reader of URLs that answers when `count` of them are asked for, and notes the most."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=60.0)
        self.most = self.now = 0
        self.lock = threading.Lock()

    def __call__(self, url: str, place: str) -> bytes:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if "bad" in url:
                raise RequestError(f"{place}: no")
            self.barrier.wait()
            return as_bytes(picture(8, 8, seed=int(url[-1])))
        finally:
            with self.lock:
                self.now -= 1


def renderer_with(fetch: Together) -> ImageRenderer:
    """The tokenizer is not asked: the encoder's images have no texts."""
    vision = {"hidden_size": 16, "num_heads": 2, "patch_size": 4, "depth": 1, "window_size": 16}
    config = {"vision_config": vision}
    processor = RawConfig(dict(QWEN_PROCESSOR), "processor")
    spec = read_qwen2_5(RawConfig(config, "config.json"), processor, 32)
    access = MediaAccess(10**6, 10**6, fetch=fetch)
    return ImageRenderer(spec, None, access, ImageBounds(16, 10**9, 1))  # type: ignore[arg-type]


def sources(*names: str) -> list[ImageSource]:
    return [ImageSource(f"image[{i}]", f"http://{HOST}/{name}") for i, name in enumerate(names)]


def test_images_of_a_prompt_are_fetched_side_by_side() -> None:
    """Fault: one after the other, so that 16 images take 16 times as long."""
    renderer = renderer_with(Together(FETCH_THREADS))
    given = sources(*(f"{i}" for i in range(2 * FETCH_THREADS)))
    mixed = [*given, ImageSource("image[8]", as_bytes(picture(8, 8, seed=9)))]
    found = [each.image.data.pixels for each in renderer.prepare_all(mixed)]
    seeds = [*range(2 * FETCH_THREADS), 9]
    alone = [
        renderer.prepare(ImageSource("", as_bytes(picture(8, 8, seed=seed)))).image.data.pixels
        for seed in seeds
    ]
    assert found == alone
    with pytest.raises(RequestError, match=r"image\[1\]: no"):
        renderer_with(Together(1)).prepare_all(sources("0", "bad", "2"))


def test_a_server_fetches_images_of_a_request_side_by_side_within_a_bound() -> None:
    prompts = PromptRenderer(Limits(), 1)

    async def fetched(fetch: Together, given: list[ImageSource]) -> list[object]:
        renderer: Any = SimpleNamespace(images=renderer_with(fetch))
        return [each.value for each in await prompts._fetched(renderer, given, "")]

    try:
        fetch = Together(FETCHES_TOGETHER)
        given = sources(*(f"{i}" for i in range(3 * FETCHES_TOGETHER)))
        found = asyncio.run(fetched(fetch, given))
        assert found == [as_bytes(picture(8, 8, seed=i % 10)) for i in range(len(given))]
        assert fetch.most == FETCHES_TOGETHER
        with pytest.raises(RequestError, match=r"image\[1\]: no"):
            asyncio.run(fetched(Together(1), sources("0", "bad", "2")))
    finally:
        prompts.close()

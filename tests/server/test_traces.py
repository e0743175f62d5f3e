"""Traces of requests: the spans that a collector gets, and the cost of one that is gone."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire import ConfigError
from quire.engine.model_front import ModelFront
from quire.server.readings import span_exporter
from quire.server.readings.span_exporter import Collector, SpanExporter, collector_of
from quire.server.readings.spans import MAX_CHARS, TraceContext, request_spans
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import ChatRequest
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.running import MODEL, running_server
from tests.server.test_explain import planted

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a secret"}],
    "max_tokens": 6, "temperature": 0.5, "stop": "#",
}  # fmt: skip
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Spans:
    """A collector on this machine. bodies: decoded posts. status: number that it answers with."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.status = 200
        spans = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                spans.bodies.append(json.loads(body))
                spans.headers.append({k.lower(): v for k, v in self.headers.items()})
                spans.paths.append(self.path)
                self.send_response(spans.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[dict[str, Any]]:
        return [
            {**span, "attributes": {a["key"]: _plain(a["value"]) for a in span["attributes"]}}
            for body in self.bodies
            for resource in body["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def requests(self) -> list[dict[str, Any]]:
        """Spans of whole requests, by their beginnings."""
        found = [span for span in self.spans() if span["kind"] == 2]
        return sorted(found, key=lambda span: int(span["startTimeUnixNano"]))


def _plain(value: dict[str, Any]) -> Any:
    ((kind, found),) = value.items()
    if kind == "arrayValue":
        return [_plain(each) for each in found["values"]]
    if kind == "intValue":
        assert isinstance(found, str), "OTLP's JSON writes 64-bit numbers as strings"
        return int(found)
    return found


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    monkeypatch.setattr(span_exporter, "DELAY_S", 0.02)
    spans = Spans()
    yield spans
    spans.server.shutdown()
    spans.server.server_close()


def ask(front: ModelFront, collector: Spans, calls: list[dict[str, Any]], names: str = "genai"):
    """Send chats, each with its headers, to a server that exports. Return the replies."""
    settings = ServerSettings(otlp_traces_endpoint=collector.url, otlp_names=names)
    with running_server(front, settings) as server:
        with waiting.PatientClient(base_url=server.url) as client:
            replies = [
                client.post(call.pop("path", CHAT), headers=call.pop("headers", {}), json=call)
                for call in calls
            ]
        server.wait_until_idle()
    return replies


def test_a_collector_gets_each_request_and_its_phases(front: ModelFront, collector: Spans) -> None:
    """Turns red when a phase, a name or an id is missing, or a parent is ignored."""
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    replies = ask(
        front,
        collector,
        [
            {**BODY, "headers": parent},
            {**BODY, "model": "nope"},
            {**BODY, "stream": True},
            {"path": "/v1/completions", "prompt": "hi", "max_tokens": 2},
            {**BODY, "headers": {"traceparent": f"00-{TRACE}-{PARENT}-00"}},
        ],
    )
    assert [reply.status_code for reply in replies] == [200, 404, 200, 200, 200]
    assert set(collector.paths) == {"/v1/traces"}
    assert {each["content-type"] for each in collector.headers} == {"application/json"}
    first, refused, streamed, text = collector.requests()
    assert (first["traceId"], first["parentSpanId"]) == (TRACE, PARENT)
    assert replies[0].headers["traceparent"] == f"00-{TRACE}-{first['spanId']}-01"
    assert first["name"] == f"chat {MODEL}"
    assert first["attributes"] == {
        "http.route": CHAT,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.usage.input_tokens": replies[0].json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": ["#"],
        "quire.request_id": replies[0].headers["x-request-id"],
        "quire.cache.reason": "nothing_before",
    }
    phases = [span for span in collector.spans() if span.get("parentSpanId") == first["spanId"]]
    assert [span["name"] for span in phases] == ["render", "queue", "prefill", "decode"]
    for span in phases:
        assert span["traceId"] == TRACE
        times = [int(first["startTimeUnixNano"]), int(span["startTimeUnixNano"])]
        times += [int(span["endTimeUnixNano"]), int(first["endTimeUnixNano"])]
        assert times == sorted(times)
    assert [event["name"] for event in first["events"]] == ["first token"]
    details = {
        span["name"]: span
        for span in collector.spans()
        for phase in phases
        if span.get("parentSpanId") == phase["spanId"]
    }
    assert set(details) == {"prefill chunk", "detokenize"}
    chunk = details["prefill chunk"]
    assert chunk["parentSpanId"] == phases[2]["spanId"]
    num_prompt = first["attributes"]["gen_ai.usage.input_tokens"]
    assert chunk["attributes"] == {"quire.tokens": num_prompt, "quire.decoding_rows": 0}
    assert details["detokenize"]["attributes"]["quire.busy_ms"] > 0.0
    assert streamed["attributes"]["quire.cache.reason"] == "nothing_missed"
    assert streamed["attributes"]["quire.cache.compared_request"]
    assert refused["attributes"]["error.type"] == "404" and refused["status"]["code"] == 2
    assert "parentSpanId" not in refused and "parentSpanId" not in streamed
    assert len({span["traceId"] for span in (first, refused, streamed, text)}) == 4
    assert text["name"] == f"text_completion {MODEL}"
    assert replies[4].headers["traceparent"].endswith("-00")
    assert "secret" not in json.dumps(collector.bodies), "no text leaves the server"


def test_a_trace_and_the_log_say_why(
    front: ModelFront, collector: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: a preempted request has no span of it, or another cause; the log gives no reason."""
    settings = ServerSettings(otlp_traces_endpoint=collector.url, enable_log_requests=True)
    with caplog.at_level("INFO", "quire.server"), planted(front, settings, num_blocks=12) as here:
        here.together(("a", range(80), 60), ("b", range(500, 579), 60))
        here.ask("c", [*range(64), 5, 6])
        here.server.wait_until_idle()
    requests = {each["attributes"]["quire.request_id"]: each for each in collector.requests()}
    (lost,) = [each for each in collector.spans() if each["name"] == "preempted"]
    assert lost["parentSpanId"] == requests["b"]["spanId"]
    found = lost["attributes"]
    assert (found["quire.preemption.cause"], found["quire.preemption.by"]) == ("blocks", "a")
    assert 0 < found["quire.preemption.tokens_again"] <= found["quire.preemption.computed_tokens"]
    assert int(lost["startTimeUnixNano"]) < int(lost["endTimeUnixNano"])
    assert requests["c"]["attributes"]["quire.cache.compared_request"] == "a"
    said = {
        each.message.split()[2].rstrip(":"): each.message
        for each in caplog.records
        if each.message.startswith("Finished request ")
    }
    assert set(said) == {"a", "b", "c"}
    assert "It was preempted once: since K/V blocks ran out, which request a needed" in said["b"]
    assert "Of 66 prompt tokens, " in said["c"] and "Request a, " in said["c"]


def test_a_parsed_answer_has_a_span_of_its_parsing() -> None:
    timeline = Timeline("a", CHAT, is_parsed=True, read_s=0.25)
    timeline.first_token_s, timeline.finished_s = 1.0, 2.0
    body = ChatRequest(messages=[])
    *_, last = request_spans(TraceContext.begin(""), timeline, body, MODEL, "", "genai")
    assert last["name"] == "tool parse"
    assert last["attributes"] == [{"key": "quire.busy_ms", "value": {"doubleValue": 250.0}}]


@pytest.mark.parametrize("names", ["vllm", "both"])
def test_older_names_are_there_by_a_switch(front: ModelFront, collector: Spans, names: str) -> None:
    ask(front, collector, [dict(BODY)], names)
    (span,) = collector.requests()
    found = span["attributes"]
    assert found["gen_ai.usage.completion_tokens"] == 6
    latencies = [found[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "e2e")]
    assert 0.0 < latencies[0] <= latencies[1]
    assert ("gen_ai.usage.output_tokens" in found) == (names == "both")
    assert span["name"] == ("llm_request" if names == "vllm" else f"chat {MODEL}")


def test_a_collector_that_is_gone_costs_nothing(
    front: ModelFront, collector: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when a request waits for the collector, or what is lost is not counted."""
    collector.status = 503
    settings = ServerSettings(otlp_traces_endpoint=collector.url)
    with running_server(front, settings) as server:
        with waiting.PatientClient(base_url=server.url) as client:
            assert client.post(CHAT, json=BODY).status_code == 200
            waiting.wait_for(
                lambda: (
                    f'dropped_total{{engine="0",model_name="{MODEL}"}} 7.0'
                    in client.get("/metrics").text
                ),
                "the spans of one request to be dropped",
            )
            collector.server.shutdown()
            collector.server.server_close()
            assert client.post(CHAT, json=BODY).status_code == 200
        server.wait_until_idle()
    (line,) = [each.message for each in caplog.records if "takes no traces" in each.message]
    assert "HTTP 503" in line


def test_a_full_queue_drops_whole_requests() -> None:
    exporter = SpanExporter(Collector("http://127.0.0.1:9/v1/traces", {}, "quire"))
    spans: list[dict[str, object]] = [{"name": "x"}] * 5
    started = time.monotonic()
    for _ in range(span_exporter.MAX_WAITING):
        exporter.put(spans)
    assert time.monotonic() - started < waiting.WAIT_S
    exporter.close()
    assert exporter.counts == (0, 5 * span_exporter.MAX_WAITING)


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        (f"00-{TRACE}-{PARENT}-01", True), (f"cc-{TRACE}-{PARENT}-01-more", True),
        (f"00-{TRACE}-{PARENT}-01-more", False), (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False), (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False), ("", False), ("00", False),
        (f"00-{TRACE}-{PARENT}-1", False), (f"00-{TRACE}-{PARENT}-01\n", False),
    ],
)  # fmt: skip
def test_a_parent_is_taken_if_it_is_valid(given: str, is_taken: bool) -> None:
    """W3C Trace Context, section 3.2."""
    context = TraceContext.begin(given)
    assert (context.trace_id == TRACE) == is_taken
    assert (context.parent_id == PARENT) == is_taken
    assert context.is_sampled
    assert TraceContext.begin(context.traceparent).parent_id == context.span_id


@pytest.mark.parametrize(
    ("setting", "environment", "url"),
    [
        ("", {}, None),
        ("http://a:4318", {}, "http://a:4318/v1/traces"),
        ("http://a:4318/x", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b"}, "http://a:4318/x"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:4318/"}, "http://b:4318/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b/p"}, "http://b/p/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/t"}, "https://c/t"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b", "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_a_collector_is_named_by_setting_or_environment(
    setting: str, environment: dict[str, str], url: str | None
) -> None:
    found = collector_of(setting, environment)
    assert (None if found is None else found.url) == url


def test_headers_and_name_come_from_the_environment() -> None:
    found = collector_of(
        "http://a",
        {"OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20b, y=1", "OTEL_SERVICE_NAME": "mine"},
    )
    assert found is not None
    assert (found.headers, found.service) == ({"x-key": "a b", "y": "1"}, "mine")


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("localhost:4318", {}), ("grpc://a:1", {}), ("http://a:4317", {}), ("http://", {}),
        ("http://a", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}), ("http://a:99999", {}),
        ("http://[::1", {}), ("http://a b:1", {}), ("http://a/\n", {}),
    ],
)  # fmt: skip
def test_a_url_that_cannot_be_served_is_refused_at_start(
    url: str, environment: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is "):
        collector_of(url, environment)


def test_a_url_has_no_password() -> None:
    """Turns red when one would be shown on the page, in recordings or in the log."""
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        collector_of("http://user:letmein@a:4318", {})
    assert "letmein" not in str(caught.value)


def test_a_body_cannot_make_spans_large_or_refused(front: ModelFront, collector: Spans) -> None:
    """Turns red when long texts wait in memory, or a seed beyond 63 bits loses a batch."""
    replies = ask(front, collector, [{**BODY, "model": "m" * 100_000}, {**BODY, "seed": 2**64 - 1}])
    assert [reply.status_code for reply in replies] == [404, 200]
    refused, seeded = collector.requests()
    assert refused["attributes"]["gen_ai.request.model"] == "m" * MAX_CHARS
    assert len(json.dumps(refused)) < 10 * MAX_CHARS
    assert seeded["attributes"]["gen_ai.request.seed"] == str(2**64 - 1)
    for body in collector.bodies:
        numbers = re.findall(r'"intValue": "(-?[0-9]+)"', json.dumps(body))
        assert numbers and all(-(2**63) <= int(each) < 2**63 for each in numbers)


def test_a_response_in_the_background_is_followed_to_its_end(
    front: ModelFront, collector: Spans
) -> None:
    """Turns red when its span, and its timeline, end before its first token."""
    call = {"path": "/v1/responses", "input": "hi", "background": True, "max_output_tokens": 6}
    (reply,) = ask(front, collector, [call])
    assert reply.json()["status"] in ("queued", "in_progress")
    (span,) = collector.requests()
    assert span["attributes"]["gen_ai.usage.output_tokens"] == 6
    phases = [each["name"] for each in collector.spans() if each["kind"] != 2]
    assert phases[:4] == ["render", "queue", "prefill", "decode"]


def test_a_collector_that_never_answers_is_tried_once_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(span_exporter, "DELAY_S", 0.02)
    tried, leave = threading.Event(), threading.Event()
    exporter = SpanExporter(Collector("http://127.0.0.1:9/v1/traces", {}, "quire"))
    numbers: list[int] = []

    def send(batch: list[dict[str, object]]) -> str:
        numbers.append(len(batch))
        tried.set()
        assert leave.wait(waiting.WAIT_S)
        return "timed out"

    monkeypatch.setattr(exporter, "_send", send)
    exporter.put([{"name": "x"}] * span_exporter.MAX_BATCH)
    assert tried.wait(waiting.WAIT_S)
    exporter.put([{"name": "y"}])
    exporter._stopping.set()
    leave.set()
    exporter.close()
    assert numbers == [span_exporter.MAX_BATCH]
    assert exporter.counts == (0, span_exporter.MAX_BATCH + 1)


def test_names_are_one_of_three() -> None:
    with pytest.raises(ConfigError, match=r"otlp_names is 'other'\. Give one of genai, vllm, both"):
        ServerSettings(otlp_names="other")

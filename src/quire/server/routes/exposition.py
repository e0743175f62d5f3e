"""Contents of /metrics: the names that dashboards for vLLM query, and quire's own."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from quire.base.telemetry.engine_stats import STEP_TOKEN_BOUNDS, EngineStats, engine_metrics
from quire.protocol.status import EngineState
from quire.server.readings.front_board import FrontReading
from quire.server.readings.histogram import Histogram
from quire.server.readings.metrics import ServerMetrics
from quire.server.routes.services import Services

__all__ = ["MEDIA_TYPE", "adapters_metric", "rank_metrics", "text"]

MEDIA_TYPE = CONTENT_TYPE_LATEST

_LABELS = ("model_name", "engine")
_ENDINGS = ("stop", "length", "content_filter", "repetition", "abort", "error")


def text(services: Services) -> bytes:
    """Return the text of one scrape. Names and label sets are closed: they contain no text of a
    request, except names of loaded adapters."""
    registry = CollectorRegistry()
    registry.register(_ServerCollector(services))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _ServerCollector(Collector):
    def __init__(self, services: Services) -> None:
        self._services = services

    def describe(self) -> list[Metric]:
        """None before the first scrape: the model's name is not known yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        backend = self._services.backend
        model, client = backend.model, backend.client
        labels = (model.names[0] if model is not None else "", "0")
        stats = EngineStats() if client is None else client.stats
        fronts = self._services.total()
        for name, text, value, is_total in engine_metrics(stats):
            yield (_counter if is_total else _gauge)(name, text, labels, value)
        yield from self._gauges(stats, fronts, labels)
        yield from self._counters(fronts, labels)
        yield from self._histograms(fronts.metrics, labels)
        yield _step_tokens(stats, labels)
        yield _accepted_drafts(stats, labels)
        if stats.max_adapters:
            yield adapters_metric(stats)
        yield from rank_metrics(stats)
        yield from self._http(fronts.metrics)
        yield from self._state()

    def _gauges(
        self, stats: EngineStats, fronts: FrontReading, labels: tuple[str, str]
    ) -> Iterator[Metric]:
        tokens_per_s = self._services.waiting.tokens_per_s
        status = self._services.backend.status
        kept, sessions = self._services.responses, self._services.sessions
        named, batches = self._services.named_images, self._services.batches
        is_asleep = status.state is EngineState.SLEEPING
        for name, text, value in (
            ("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", stats.kv_cache_usage),
            ("quire:host_kv_cache_usage_perc", "Of the swap space.", stats.host_kv_cache_usage),
            ("vllm:engine_sleep_state", "1 while the engine sleeps.", is_asleep),
            ("quire:front_waiting_requests", "Before the first step.", fronts.num_waiting_requests),
            ("quire:front_waiting_tokens", "Their prompt tokens.", fronts.num_waiting_tokens),
            ("quire:prefill_tokens_per_second", "While requests wait.", tokens_per_s),
            ("quire:stored_responses", "Responses that are kept.", kept.num_kept),
            ("quire:stored_bytes", "Their size.", kept.num_bytes),
            ("quire:kept_sessions", "Conversations that are kept.", sessions.num_kept),
            ("quire:session_bytes", "Their size.", sessions.num_bytes),
            ("quire:named_images", "Kept by their uuid.", named.num_kept),
            ("quire:named_image_bytes", "Their size.", named.num_bytes),
            ("quire:kept_files", "Files that are kept.", batches.num_files if batches else 0),
            ("quire:kept_file_bytes", "Their size.", batches.num_file_bytes if batches else 0),
            ("quire:open_batches", "Not ended.", batches.num_open_batches if batches else 0),
            ("quire:engine_restarts", "Engine cores that had to be replaced.", status.restarts),
        ):  # fmt: skip
            yield _gauge(name, text, labels, float(value))
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "By reason.", labels=(*_LABELS, "reason")
        )
        by_reason.add_metric((*labels, "capacity"), float(stats.num_waiting))
        yield by_reason
        capacity = status.capacity
        if capacity is not None:
            info = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The KV cache.",
                labels=("block_size", "num_gpu_blocks", "engine"),
            )
            info.add_metric((str(capacity.block_size), str(capacity.num_blocks), "0"), 1.0)
            yield info

    def _counters(self, fronts: FrontReading, labels: tuple[str, str]) -> Iterator[Metric]:
        metrics = fronts.metrics
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens.", metrics.prompt_tokens),
            ("vllm:generation_tokens", "Tokens that were generated.", metrics.generation_tokens),
            ("quire:trace_spans_sent", "Spans that the collector took.", fronts.num_spans_sent),
            ("quire:trace_spans_dropped", "Spans that it did not.", fronts.num_spans_dropped),
        ):  # fmt: skip
            yield _counter(name, text, labels, float(value))
        success = CounterMetricFamily(
            "vllm:request_success", "Samples by their end.", labels=(*_LABELS, "finished_reason")
        )
        for reason in _ENDINGS:
            success.add_metric((*labels, reason), float(metrics.finished.get(reason, 0)))
        yield success
        refused = CounterMetricFamily(
            "vllm:admission_rejections", "Shed by the waiting room.", labels=(*_LABELS, "reason")
        )
        for reason in ("requests", "tokens"):
            refused.add_metric((*labels, reason), float(fronts.refused.get(reason, 0)))
        yield refused

    def _histograms(self, found: ServerMetrics, labels: tuple[str, str]) -> Iterator[Metric]:
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival.", found.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Between tokens.", found.inter_token_latency),
            ("vllm:time_per_output_token_seconds", "As above.", found.inter_token_latency),
            ("vllm:request_time_per_output_token_seconds", "Per request.", found.request_tpot),
            ("vllm:e2e_request_latency_seconds", "Arrival to end.", found.e2e_latency),
            ("vllm:request_queue_time_seconds", "Queued to first step.", found.queue_time),
            ("vllm:request_prefill_time_seconds", "First step to token.", found.prefill_time),
            ("vllm:request_decode_time_seconds", "First to last token.", found.decode_time),
            ("vllm:request_inference_time_seconds", "First step to end.", found.inference_time),
            ("vllm:request_prompt_tokens", "Tokens of a prompt.", found.request_prompt_tokens),
            ("vllm:request_generation_tokens", "Tokens given.", found.request_generation_tokens),
            ("vllm:request_params_max_tokens", "max_tokens, if given.", found.request_max_tokens),
            ("vllm:request_params_n", "Samples per prompt.", found.request_n),
            ("quire:render_seconds", "Chat template and tokenizing.", found.render_time),
        ):  # fmt: skip
            yield _histogram(name, text, _LABELS, [(labels, histogram)])

    def _http(self, metrics: ServerMetrics) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests.", labels=("handler", "method", "status")
        )
        for key, count in metrics.http.items():
            requests.add_metric(key, float(count))
        yield requests
        series = [((handler,), found) for handler, found in metrics.http_seconds.items()]
        yield _histogram("http_request_duration_seconds", "HTTP requests.", ("handler",), series)

    def _state(self) -> Iterator[Metric]:
        now = self._services.backend.status.state
        family = GaugeMetricFamily(
            "quire:engine_state", "1 for the present one.", labels=("state",)
        )
        for state in EngineState:
            family.add_metric((state.value,), float(state is now))
        yield family


def _gauge(name: str, text: str, labels: tuple[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=_LABELS)
    family.add_metric(labels, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=_LABELS)
    family.add_metric(labels, value)
    return family


def _histogram(
    name: str,
    text: str,
    labels: tuple[str, ...],
    series: list[tuple[tuple[str, ...], Histogram]],
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in series:
        family.add_metric(values, histogram.cumulative(), histogram.total)
    return family


def _accepted_drafts(stats: EngineStats, labels: tuple[str, str]) -> Metric:
    """Count by position among the drafts of a row and step, from 0."""
    family = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were right.",
        labels=(*_LABELS, "position"),
    )
    for place, count in enumerate(stats.accepted_drafts_at):
        family.add_metric((*labels, str(place)), float(count))
    return family


def adapters_metric(stats: EngineStats) -> Metric:
    """Gauge of the time of the scrape, labelled with the adapters of requests."""
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "LoRA adapters of requests.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    names = (",".join(each) for each in (stats.running_adapters, stats.waiting_adapters))
    family.add_metric((str(stats.max_adapters), *names), time.time())
    return family


def rank_metrics(stats: EngineStats) -> Iterator[Metric]:
    """CPU time and memory of each rank's process, over all replicas. None with one rank."""
    for family, values in (
        (
            CounterMetricFamily("quire:rank_cpu_seconds", "CPU time.", labels=("rank",)),
            stats.rank_cpu_seconds,
        ),
        (
            GaugeMetricFamily("quire:rank_resident_bytes", "Memory in use.", labels=("rank",)),
            stats.rank_resident_bytes,
        ),
    ):
        for rank, value in enumerate(values):
            family.add_metric((str(rank),), float(value))
        if values:
            yield family


def _step_tokens(stats: EngineStats, labels: tuple[str, str]) -> Metric:
    """Sampled tokens per step, counted by the engine core."""
    histogram = Histogram(tuple(map(float, STEP_TOKEN_BOUNDS)))
    histogram.counts = list(stats.step_tokens)
    histogram.total = float(stats.generation_tokens_total)
    return _histogram(
        "vllm:iteration_tokens_total", "Tokens of a step.", _LABELS, [(labels, histogram)]
    )

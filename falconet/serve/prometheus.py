"""Metrics in Prometheus' format: requests, photos, batches, the queue, and the process itself."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from falconet.serve.records import Record

if TYPE_CHECKING:
    from falconet.serve.repository import Model

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NO_ROUTE = "none"  # all unknown addresses together: what clients make up must not become a label


class Metrics:
    """A server's metrics. Labels are routes, names of loaded models, and status codes: few, whatever clients send."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        counter, histogram = self._counter, self._histogram
        self._requests = counter("requests", "Requests by route, model and status.", "route", "model", "status")
        self._refused = counter("refused", "Requests that were not answered, by reason.", "reason")
        self._seconds = histogram("request_seconds", "Time from a request's headers to its answer.", SECONDS, "route")
        self._bytes_in = counter("received_bytes", "Bytes of request bodies.", "route")
        self._photos = counter("photos", "Photos received.", "model")
        self._unreadable = counter("unreadable_photos", "Photos that could not be decoded.", "model")
        self._decode = histogram("decode_seconds", "Time to decode the photos in a request.", SECONDS, "model")
        self._images = counter("images", "Images computed.", "model")
        self._queue = histogram("queue_seconds", "Time that a request waits for its batch.", SECONDS, "model")
        self._compute = histogram("compute_seconds", "Time to compute a batch.", SECONDS, "model")
        self._batches = histogram("batch_images", "Images in a batch.", IMAGES, "model")

    # Found by label: this takes the library 4 microseconds, a cache 0.1; the cache grows as little as the labels do.

    def _counter(self, name: str, about: str, *labels: str) -> Callable[..., Counter]:
        return cache(Counter(name, about, labels, namespace="falconet", registry=self._registry).labels)

    def _histogram(self, name: str, about: str, buckets: Sequence[float], *labels: str) -> Callable[..., Histogram]:
        return cache(
            Histogram(name, about, labels, namespace="falconet", buckets=buckets, registry=self._registry).labels
        )

    def watch(self, *, models: Callable[[], Sequence["Model"]], in_flight: Callable[[], int]) -> None:
        """Also show values that are read when the metrics are asked for."""
        self._registry.register(_Present(models))
        Gauge(
            "requests_in_flight", "Requests being answered.", namespace="falconet", registry=self._registry
        ).set_function(in_flight)

    def count_lost_lines(self, lost: Callable[[], int]) -> None:
        """Show how many lines of the access log could not be written."""
        Gauge(
            "access_log_lost_lines", "Lines that could not be written.", namespace="falconet", registry=self._registry
        ).set_function(lost)

    def add(self, record: Record) -> None:
        """Count a request that has ended."""
        route = record.route or NO_ROUTE
        self._requests(route, record.model, record.status).inc()
        self._seconds(route).observe(record.seconds)
        self._bytes_in(route).inc(record.bytes_in)
        if record.reason:
            self._refused(record.reason).inc()
        if record.photos:
            self._photos(record.model).inc(record.photos)
            self._unreadable(record.model).inc(record.unreadable)
            self._decode(record.model).observe(record.stages["decode"].seconds)
        if record.images:
            self._images(record.model).inc(record.images)
            self._queue(record.model).observe(record.stages["queue"].seconds)

    def add_batch(self, model: str, images: int, seconds: float) -> None:
        """Count a batch that has been computed."""
        self._batches(model).observe(images)
        self._compute(model).observe(seconds)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics and their content type, in the newest format that the client accepts."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Present(Collector):
    """Collects values that are read when the metrics are asked for."""

    def __init__(self, models: Callable[[], Sequence["Model"]]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        models = self._models()
        waiting = GaugeMetricFamily("falconet_queue_images", "Images waiting for a batch.", labels=["model"])
        longest = GaugeMetricFamily("falconet_queue_limit_images", "Most images that may wait.", labels=["model"])
        loaded = GaugeMetricFamily("falconet_model_info", "Loaded models, by version.", labels=["model", "version"])
        for model in models:
            waiting.add_metric([model.served.name], model.batcher.waiting)
            longest.add_metric([model.served.name], model.batcher.policy.max_queue)
            loaded.add_metric([model.served.name, model.served.version], 1)
        yield waiting
        yield longest
        yield loaded

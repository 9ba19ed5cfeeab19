"""Reading a page of metrics as a scraper does."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import ServerMetrics

OURS = ("vllm", "pointsman:", "http_")


def read_families(metrics: ServerMetrics) -> dict[str, Metric]:
    """The page's families by the name on their TYPE line, those of the process left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        if family.name.startswith(OURS):
            name = family.name + "_total" * (family.type == "counter")
            assert name not in found, f"{name} is on the page twice"
            found[name] = family
    return found


def read_samples(metrics: ServerMetrics) -> dict[tuple[str, str], float]:
    """Every sample of ours by (name, its own labels as text)."""
    found = {}
    for family in read_families(metrics).values():
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return found

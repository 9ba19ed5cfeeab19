"""The chapter's healthy ranges (3.9), in the table's words and as numbers."""

import math
import re

import pytest

from server.metric_row import Healthy, MetricRow
from server.metrics_table import TABLE
from server.monitoring import thresholds
from server.monitoring.thresholds import find_range

# Source: the chapter's section 3.9, what is healthy and what is not.
CHAPTER = {
    "vllm_num_requests_running": Healthy(low=0.7, high=0.9, share_of="pointsman:max_num_seqs"),
    "vllm_num_requests_waiting": Healthy(high=0),
    "vllm_kv_cache_usage_ratio": Healthy(low=0.4, high=0.8, alarm=0.95),
    "vllm_preempted_requests_total": Healthy(high=0),
    "vllm_prefix_cache_hit_ratio": Healthy(low=0.6, is_low_bad=True),
}


@pytest.mark.parametrize("name", CHAPTER)
def test_a_range_is_the_chapters(name: str) -> None:
    assert find_range(name) == CHAPTER[name]


def test_the_chapters_signs_begin_where_it_says() -> None:
    assert (thresholds.KV_FULL, thresholds.KV_FREE) == (0.95, 0.5)
    assert thresholds.HEALTHY_HIT_RATIO == 0.6


def test_a_metric_without_a_range_has_none_to_go_by() -> None:
    with pytest.raises(AssertionError, match="no healthy range"):
        find_range("vllm:generation_tokens_total")


@pytest.mark.parametrize("row", [row for row in TABLE if row.healthy and not row.alias_of], ids=lambda row: row.name)
def test_the_table_says_the_same_in_words(row: MetricRow) -> None:
    assert row.healthy is not None
    bounds = {row.healthy.low, row.healthy.high} - {0.0, math.inf}
    shown = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", row.tells)}
    assert shown >= bounds or {number / 100 for number in shown} >= bounds
    assert row.tells

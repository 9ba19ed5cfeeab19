"""Where a value stops being healthy, for what the table of metrics gives no range. The source of most is the chapter
that the scheduler is built after, section 3.9; the rest are what people notice."""

from __future__ import annotations

from server.metric_row import Healthy
from server.monitoring.series import find_row


def find_range(name: str) -> Healthy:
    """Return a metric's healthy range; it must have one."""
    healthy = find_row(name).healthy
    assert healthy is not None, f"{name} has no healthy range in the table"
    return healthy


# Above it the pool is full; with preemptions it starves.
KV_FULL = find_range("vllm:kv_cache_usage_perc").alarm
# Below it there is room, and requests should not have to wait.
KV_FREE = 0.5
# Of --max-num-seqs, over some minutes: a place stands empty for a step whenever a request ends.
CAPPED = 0.95
HEALTHY_HIT_RATIO = find_range("vllm_prefix_cache_hit_ratio").low
# Half of what is healthy: most of the prompts' beginnings are computed again.
POOR_HIT_RATIO = HEALTHY_HIT_RATIO / 2
STUCK_S = find_range("pointsman:seconds_since_progress").alarm
# People wait no longer, and read no more slowly: 5 tokens a second. Both are bounds of buckets, so quantiles are exact.
FIRST_TOKEN = Healthy(high=2.5, alarm=10.0)
TOKEN_GAP = Healthy(high=0.1, alarm=0.2)
ERROR_SHARE = Healthy(high=0.0, alarm=0.05)
ABORT_SHARE = 0.25
MIN_ENDED = 20
# Preemptions by requests that ended: one in ten loses its work.
PREEMPTED_SHARE = 0.1
FILES_SHARE = 0.8
MEMORY_MIB_PER_HOUR = 64

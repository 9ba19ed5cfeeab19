"""For every alert: figures of a server for which it fires, and of others that look alike and for which it must not.

promtool runs them, from deploy/prometheus/alerts_test.yaml: ``python -m tests.server.monitoring.promtool_file``.
"""

from __future__ import annotations

from dataclasses import dataclass

JOB = ("job", "instance")
MODEL = ("job", "instance", "model_name", "engine")
FLAT = "x60"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One server's figures, a sample a minute, and what the alert makes of them.

    Attributes:
        alert: Its name, without the common beginning.
        what: In a few words.
        series: Values by series, in promtool's notation; the labels that all have are added.
        minute: When it is looked at.
        shown: The value as the summary shows it, "" where it shows none; None = the alert does not fire.
        labels: Of the alert, beside severity.
        more: Labels that this alert has beside those.
    """

    alert: str
    what: str
    series: dict[str, str]
    minute: int
    shown: str | None = None
    labels: tuple[str, ...] = MODEL
    more: tuple[tuple[str, str], ...] = ()


def steady(value: float) -> str:
    """The same for an hour."""
    return f"{value:g}+0{FLAT}"


def rising(amount: float) -> str:
    """A counter from 0 on, for an hour."""
    return f"0+{amount:g}{FLAT}"


def alternating(*values: int) -> str:
    return " ".join(str(values[i % len(values)]) for i in range(61))


RUNNING, WAITING, MAX = "vllm:num_requests_running", "vllm:num_requests_waiting", "pointsman:max_num_seqs"
KV, PREEMPTIONS, LIVE = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total", "pointsman:num_live_requests"
PREFILL = "pointsman:prompt_tokens_scheduled_total"
ENDED, ABORTED, FAILED = (
    f'vllm:request_success_total{{finished_reason="{end}"}}' for end in ("stop", "abort", "error")
)
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
UNKNOWN_KEYS = 'pointsman:access_refusals_total{reason="unknown_key"}'
FILES, MAX_FILES = "process_open_fds", "process_max_fds"


def http(status: str) -> str:
    return f'http_requests_total{{handler="/v1/completions", method="POST", status="{status}"}}'


def buckets(name: str, **up_to: str) -> dict[str, str]:
    """A histogram's buckets; ``le_0_2`` is the one up to 0.2."""
    bounds = {key.removeprefix("le_").replace("_", ".").replace("inf", "+Inf"): value for key, value in up_to.items()}
    return {f'{name}_bucket{{le="{bound}"}}': values for bound, values in bounds.items()}


AVAILABILITY_CASES = (
    Case(alert="EngineDown", what="gone", series={"up": "1 0+0x9"}, minute=4, shown="", labels=JOB),
    Case(alert="EngineDown", what="answering", series={"up": steady(1)}, minute=4),
    Case(alert="EngineDown", what="one scrape lost", series={"up": "1 1 0 1 1 1"}, minute=3),
    Case(alert="NotReady", what="never ready", series={"pointsman:ready": steady(0)}, minute=12, shown=""),
    Case(alert="NotReady", what="loading for 8 minutes", series={"pointsman:ready": "0+0x8 1+0x20"}, minute=12),
    Case(
        alert="EngineStuck",
        what="45 s in one step",
        series={"pointsman:seconds_since_progress": steady(45)},
        minute=1,
        shown="45s",
    ),
    Case(alert="EngineStuck", what="a long step", series={"pointsman:seconds_since_progress": steady(4)}, minute=1),
    Case(
        alert="WatchdogNearMiss",
        what="once",
        series={"pointsman:watchdog_near_misses_total": "0 0 1 1 1 1"},
        minute=5,
        shown="1",
    ),
    Case(
        alert="WatchdogNearMiss",
        what="long ago",
        series={"pointsman:watchdog_near_misses_total": "0 1+0x30"},
        minute=20,
    ),
    Case(
        alert="RestartLoop",
        what="three restarts",
        series={"process_start_time_seconds": "100 200 300 400 400 400"},
        minute=5,
        shown="3",
        labels=JOB,
    ),
    Case(
        alert="RestartLoop",
        what="one restart",
        series={"process_start_time_seconds": "100+0x10 700+0x10"},
        minute=15,
    ),
)

SCHEDULER_CASES = (
    Case(
        alert="KVStarvation",
        what="full and preempting",
        series={KV: steady(0.97), PREEMPTIONS: rising(6)},
        minute=12,
        shown="97%",
    ),
    Case(alert="KVStarvation", what="full, flat", series={KV: steady(0.97), PREEMPTIONS: steady(6)}, minute=12),
    Case(alert="KVStarvation", what="room left", series={KV: steady(0.9), PREEMPTIONS: rising(6)}, minute=12),
    Case(alert="KVCacheFull", what="full", series={KV: steady(0.96)}, minute=16, shown="96%"),
    Case(alert="KVCacheFull", what="nearly full", series={KV: steady(0.94)}, minute=16),
    Case(alert="KVCacheFull", what="full for a moment", series={KV: "0.5+0x8 1+0x3 0.5+0x20"}, minute=20),
    Case(
        alert="PreemptionRate",
        what="3 for 10 ends",
        series={PREEMPTIONS: rising(3), ENDED: rising(10)},
        minute=35,
        shown="30%",
    ),
    Case(alert="PreemptionRate", what="1 for 20 ends", series={PREEMPTIONS: rising(1), ENDED: rising(20)}, minute=35),
    Case(alert="PreemptionRate", what="idle", series={PREEMPTIONS: steady(9), ENDED: steady(9)}, minute=35),
    Case(
        alert="CappedByMaxNumSeqs",
        what="all places taken",
        series={WAITING: steady(3), RUNNING: steady(8), MAX: steady(8)},
        minute=16,
        shown="3",
    ),
    Case(
        alert="CappedByMaxNumSeqs",
        what="a place empty now and then",
        series={WAITING: alternating(3, 4), RUNNING: alternating(20, 20, 20, 19), MAX: steady(20)},
        minute=16,
        shown="3",
    ),
    Case(
        alert="CappedByMaxNumSeqs",
        what="places free",
        series={WAITING: steady(3), RUNNING: steady(5), MAX: steady(8)},
        minute=16,
    ),
    Case(
        alert="CappedByMaxNumSeqs",
        what="bursts",
        series={WAITING: alternating(5, 0, 0), RUNNING: steady(8), MAX: steady(8)},
        minute=16,
    ),
    Case(
        alert="WaitingWithFreeKV",
        what="places and blocks free",
        series={WAITING: steady(3), KV: steady(0.2), RUNNING: steady(2), MAX: steady(8)},
        minute=16,
        shown="3",
    ),
    Case(
        alert="WaitingWithFreeKV",
        what="blocks scarce",
        series={WAITING: steady(3), KV: steady(0.7), RUNNING: steady(2), MAX: steady(8)},
        minute=16,
    ),
    Case(
        alert="WaitingWithFreeKV",
        what="all places taken",
        series={WAITING: steady(3), KV: steady(0.2), RUNNING: steady(8), MAX: steady(8)},
        minute=16,
    ),
    Case(
        alert="PrefillStarvation",
        what="nobody admitted",
        series={WAITING: steady(3), PREFILL: steady(500), RUNNING: steady(2), MAX: steady(8), KV: steady(0.2)},
        minute=12,
        shown="3",
    ),
    Case(
        alert="PrefillStarvation",
        what="prompts computed",
        series={WAITING: steady(3), PREFILL: rising(100), RUNNING: steady(2), MAX: steady(8), KV: steady(0.2)},
        minute=12,
    ),
    Case(
        alert="PrefillStarvation",
        what="all places taken by long outputs",
        series={WAITING: steady(3), PREFILL: steady(500), RUNNING: steady(8), MAX: steady(8), KV: steady(0.2)},
        minute=12,
    ),
    Case(
        alert="PrefillStarvation",
        what="all blocks taken by long outputs",
        series={WAITING: steady(3), PREFILL: steady(500), RUNNING: steady(2), MAX: steady(8), KV: steady(0.98)},
        minute=12,
    ),
    Case(
        alert="PrefillStarvation",
        what="idle",
        series={WAITING: steady(0), PREFILL: steady(500), RUNNING: steady(0), MAX: steady(8), KV: steady(0)},
        minute=12,
    ),
    Case(
        alert="LeakedRequests",
        what="5 in the engine, 2 awaited",
        series={RUNNING: steady(4), WAITING: steady(1), LIVE: steady(2)},
        minute=6,
        shown="5",
    ),
    Case(
        alert="LeakedRequests",
        what="all awaited",
        series={RUNNING: steady(4), WAITING: steady(1), LIVE: steady(5)},
        minute=6,
    ),
    Case(
        alert="LeakedRequests",
        what="an abort under way at every other scrape",
        series={RUNNING: steady(4), WAITING: steady(1), LIVE: alternating(5, 4)},
        minute=7,
    ),
    Case(
        alert="LeakedBlocks",
        what="blocks held while idle",
        series={KV: steady(0.25), RUNNING: steady(0)},
        minute=12,
        shown="25%",
    ),
    Case(alert="LeakedBlocks", what="idle and empty", series={KV: steady(0), RUNNING: steady(0)}, minute=12),
    Case(alert="LeakedBlocks", what="busy", series={KV: steady(0.25), RUNNING: alternating(1, 0)}, minute=12),
)

TRAFFIC_CASES = (
    Case(
        alert="QueueBacklog",
        what="20 wait for 8 places",
        series={WAITING: steady(20), MAX: steady(8)},
        minute=6,
        shown="20",
    ),
    Case(alert="QueueBacklog", what="6 wait for 8", series={WAITING: steady(6), MAX: steady(8)}, minute=6),
    Case(
        alert="HighTTFT",
        what="all beyond 10 s",
        series=buckets("vllm:time_to_first_token_seconds", le_10=steady(0), le_20=rising(9), le_inf=rising(9)),
        minute=16,
        shown="19.5s",
        labels=("job", "instance", "model_name"),
    ),
    Case(
        alert="HighTTFT",
        what="all within 10 s",
        series=buckets("vllm:time_to_first_token_seconds", le_10=rising(9), le_20=rising(9), le_inf=rising(9)),
        minute=16,
    ),
    Case(
        alert="HighITL",
        what="all beyond 0.2 s",
        series=buckets("vllm:inter_token_latency_seconds", le_0_2=steady(0), le_0_3=rising(9), le_inf=rising(9)),
        minute=16,
        shown="295ms",
        labels=("job", "instance", "model_name"),
    ),
    Case(
        alert="HighITL",
        what="all within 0.2 s",
        series=buckets("vllm:inter_token_latency_seconds", le_0_2=rising(9), le_0_3=rising(9), le_inf=rising(9)),
        minute=16,
    ),
    Case(
        alert="ErrorRate",
        what="one in ten",
        series={http("5xx"): rising(10), http("2xx"): rising(90)},
        minute=12,
        shown="10%",
        labels=JOB,
    ),
    Case(alert="ErrorRate", what="1 in 100", series={http("5xx"): rising(1), http("2xx"): rising(99)}, minute=12),
    Case(alert="ErrorRate", what="none", series={http("4xx"): rising(50), http("2xx"): rising(50)}, minute=12),
    Case(
        alert="RequestErrors",
        what="the first",
        series={FAILED: "0 0 1 1 1 1", ENDED: rising(50)},
        minute=5,
        shown="1",
        more=(("finished_reason", "error"),),
    ),
    Case(alert="RequestErrors", what="long ago", series={FAILED: "0 0 3+0x40", ENDED: rising(50)}, minute=15),
    Case(
        alert="Rejections",
        what="one a second",
        series={'vllm:admission_rejections_total{reason="queue_full"}': rising(60)},
        minute=12,
        shown="1.00",
    ),
    Case(
        alert="Rejections",
        what="long ago",
        series={'vllm:admission_rejections_total{reason="queue_full"}': steady(60)},
        minute=12,
    ),
    Case(
        alert="Rejections",
        what="one key's",
        series={'vllm:admission_rejections_total{reason="key_rate"}': rising(60)},
        minute=12,
    ),
    Case(
        alert="UnknownKeys",
        what="six a minute",
        series={UNKNOWN_KEYS: rising(6)},
        minute=30,
        shown="6",
        more=(("reason", "unknown_key"),),
    ),
    Case(alert="UnknownKeys", what="a typing error", series={UNKNOWN_KEYS: "0+0x20 2+0x40"}, minute=30),
    Case(
        alert="AbortRate",
        what="every other one",
        series={ABORTED: rising(5), ENDED: rising(5)},
        minute=40,
        shown="50%",
    ),
    Case(alert="AbortRate", what="one in ten", series={ABORTED: rising(1), ENDED: rising(9)}, minute=40),
    Case(alert="AbortRate", what="the only one", series={ABORTED: "0+0x20 1+0x40", ENDED: steady(4)}, minute=40),
    Case(
        alert="PrefixHitDrop",
        what="from 80 % to 10 %",
        series={HITS: "0+80x400 32010+10x60", QUERIES: "0+100x461"},
        minute=450,
        shown="10%",
    ),
    Case(alert="PrefixHitDrop", what="steady", series={HITS: "0+80x461", QUERIES: "0+100x461"}, minute=450),
    Case(alert="PrefixHitDrop", what="never shared", series={HITS: "0+10x461", QUERIES: "0+100x461"}, minute=450),
)

PROCESS_CASES = (
    Case(
        alert="OpenFiles",
        what="nine of ten",
        series={FILES: steady(900), MAX_FILES: steady(1000)},
        minute=6,
        shown="90%",
        labels=JOB,
    ),
    Case(alert="OpenFiles", what="one of ten", series={FILES: steady(100), MAX_FILES: steady(1000)}, minute=6),
    Case(
        alert="MemoryGrowth",
        what="2 MiB a minute",
        series={"process_resident_memory_bytes": "1000000000+2097152x240"},
        minute=200,
        shown="120",
        labels=JOB,
    ),
    Case(
        alert="MemoryGrowth",
        what="grown, then level",
        series={"process_resident_memory_bytes": "1000000000+2097152x60 1125829120+0x180"},
        minute=200,
    ),
)

CASES = (*AVAILABILITY_CASES, *SCHEDULER_CASES, *TRAFFIC_CASES, *PROCESS_CASES)

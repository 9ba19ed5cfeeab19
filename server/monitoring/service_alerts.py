"""Signs that clients are not served, or not well, and that the process itself is in trouble."""

from __future__ import annotations

from server.monitoring.alert import Alert
from server.monitoring.thresholds import (
    ABORT_SHARE,
    ERROR_SHARE,
    FILES_SHARE,
    FIRST_TOKEN,
    HEALTHY_HIT_RATIO,
    MEMORY_MIB_PER_HOUR,
    MIN_ENDED,
    POOR_HIT_RATIO,
    STUCK_S,
    TOKEN_GAP,
)

_ENDED = "sum without (finished_reason) (increase(vllm:request_success_total[15m]))"
_ABORTED = 'sum without (finished_reason) (increase(vllm:request_success_total{finished_reason="abort"}[15m]))'


def _p95(histogram: str) -> str:
    return f"histogram_quantile(0.95, sum by (job, instance, model_name, le) (rate({histogram}_bucket[5m])))"


def _hit_ratio(window: str) -> str:
    return f"rate(vllm:prefix_cache_hits_total{window}) / rate(vllm:prefix_cache_queries_total{window})"


AVAILABILITY_ALERTS = (
    Alert(
        name="EngineDown",
        expr="up == 0",
        hold="1m",
        severity="critical",
        summary="{{ $labels.instance }} does not answer.",
        description="Prometheus cannot fetch /metrics: the process is gone, hangs, or refuses the key. Look at the "
        "process, its exit code and its last log lines.",
        runbook=(
            "See how the process ended: `systemctl status pointsman`, `docker ps -a` or `kubectl describe pod`. The "
            "README lists the exit codes; 70 is a dead engine, 71 a stuck one, 137 a process killed for its memory.",
            "If it runs, ask it yourself: curl /health, then /metrics. A 401 means that Prometheus has no key, or an "
            "old one.",
            "Restart it. If it dies again, follow PointsmanRestartLoop.",
        ),
    ),
    Alert(
        name="NotReady",
        expr="pointsman:ready == 0",
        hold="10m",
        severity="critical",
        summary="{{ $labels.instance }} has not been ready for ten minutes.",
        description="It answers, but takes no requests: it loads, drains, or its engine makes no progress. Look at "
        "/ready: its body names the phase and how far it has come.",
        runbook=(
            "curl /ready. While loading, progress should rise: a large model from a slow disk takes its time.",
            "If it drains, it was told to stop: see why it has not ended; a second SIGTERM ends it at once.",
            "If its engine makes no progress, follow PointsmanEngineStuck.",
        ),
    ),
    Alert(
        name="EngineStuck",
        expr=f"pointsman:seconds_since_progress > {STUCK_S:g}",
        hold="0m",
        severity="critical",
        summary="The engine of {{ $labels.instance }} has made no progress for {{ $value | humanizeDuration }}, with "
        "work in hand.",
        description="One step does not end. /ready says 503, so balancers send nothing new; streams stand still. Look "
        "at the machine: swap, stopped processes, a throttled container.",
        runbook=(
            "See whether the machine is at fault: memory in swap, CPU quota used up, the process stopped (state T).",
            "If it is not, keep the stacks: `py-spy dump --pid PID`, or the log, where the watchdog writes them.",
            "Restart the server if it does not end by itself.",
        ),
    ),
    Alert(
        name="WatchdogNearMiss",
        expr="increase(pointsman:watchdog_near_misses_total[15m]) > 0",
        hold="0m",
        severity="warning",
        summary="{{ $labels.instance }} stood still for half of its watchdog's deadline, {{ $value | humanize }} "
        "times.",
        description="A step, or the event loop, took very long and then went on; at all of the deadline the process "
        "would have ended with 71. Look in the log, where the watchdog wrote what each thread did.",
        runbook=(
            "Read the stacks: a step is slow (too large a batch, a starved machine), or something blocks the event "
            "loop.",
            "Steps: lower --max-num-batched-tokens, and see whether others use the machine's cores or its memory "
            "swaps.",
            "If such steps are right for this model and machine, raise --watchdog-timeout-s.",
        ),
    ),
    Alert(
        name="RestartLoop",
        expr="changes(process_start_time_seconds[15m]) > 2",
        hold="0m",
        severity="critical",
        summary="{{ $labels.instance }} has started {{ $value | humanize }} times within 15 minutes.",
        description="It comes up and dies again. Look at the exit code and at the last lines of the log before it.",
        runbook=(
            "Read the exit code: 64 is a wrong flag, 69 a port that is taken, 70 a dead engine, 71 a stuck one; 137 "
            "without a word of ours is the kernel, out of memory.",
            "Out of memory: lower --kv-cache-bytes, or allow the container more.",
            "If one request kills it each time, keep it away: a router repeats it on every server. The log has its id.",
        ),
    ),
)

TRAFFIC_ALERTS = (
    Alert(
        name="QueueBacklog",
        expr="avg_over_time(vllm:num_requests_waiting[5m]) > pointsman:max_num_seqs",
        hold="5m",
        severity="warning",
        summary="{{ $value | humanize }} requests wait on {{ $labels.instance }}, more than it can run at once.",
        description="Whoever comes now waits for a whole turn of the others first. Look at “Queue time” and at "
        "“Requests waiting by reason”.",
        runbook=(
            "See what is short: places (PointsmanCappedByMaxNumSeqs), KV blocks (PointsmanKVCacheFull), or only speed.",
            "Add a server, or send it less.",
            "Bound the queue with --max-queued-requests and --max-queued-tokens: a quick no is better than an answer "
            "that nobody waits for any more.",
        ),
    ),
    Alert(
        name="HighTTFT",
        expr=f"{_p95('vllm:time_to_first_token_seconds')} > {FIRST_TOKEN.alarm:g}",
        hold="10m",
        severity="warning",
        summary="One request in twenty on {{ $labels.instance }} waits {{ $value | humanizeDuration }} or longer for "
        "its first token.",
        description="The wait is the queue's or the prompt's. Look at “Queue time” beside “Prefill time”: the greater "
        "one is to blame.",
        runbook=(
            "“Queue time”: follow PointsmanQueueBacklog.",
            "“Prefill time”: prompts are long or not found in the cache. See “Prefix cache hits”, and raise "
            "--max-num-batched-tokens if gaps between tokens allow it.",
        ),
    ),
    Alert(
        name="HighITL",
        expr=f"{_p95('vllm:inter_token_latency_seconds')} > {TOKEN_GAP.alarm:g}",
        hold="10m",
        severity="warning",
        summary="One gap between tokens in twenty on {{ $labels.instance }} is {{ $value | humanizeDuration }} or "
        "longer.",
        description="Text comes more slowly than people read. Steps are too large, or the machine is too slow for the "
        "batch. Look at “Tokens a step” and at “Requests running”.",
        runbook=(
            "If gaps come with prompt tokens, prompts crowd out the streams: set --target-itl-ms, or lower "
            "--max-num-batched-tokens.",
            "If they come without, the batch is too large: lower --max-num-seqs.",
            "See whether others use the machine's cores, and whether a container's quota is used up.",
        ),
    ),
    Alert(
        name="ErrorRate",
        expr='sum by (job, instance) (rate(http_requests_total{status="5xx"}[5m])) '
        f"/ sum by (job, instance) (rate(http_requests_total[5m])) > {ERROR_SHARE.alarm:g}",
        hold="5m",
        severity="critical",
        summary="{{ $value | humanizePercentage }} of the requests to {{ $labels.instance }} fail.",
        description="Answers with a 5xx status. Refusals for want of room are 503 and count. Look at “HTTP requests by "
        "status”, and at “Rejections”.",
        runbook=(
            "If “Rejections” rise alike, the server is full: follow PointsmanRejections.",
            "Else read the log: a 500 is logged with its traceback, once each.",
            "A 503 `not_ready` means that clients come while it loads or drains: have the balancer look at /ready.",
        ),
    ),
    Alert(
        name="RequestErrors",
        expr='increase(vllm:request_success_total{finished_reason="error"}[10m]) > 0',
        hold="0m",
        severity="warning",
        summary="On {{ $labels.instance }} requests end by an error of the engine: {{ $value | humanize }} within ten "
        "minutes.",
        description="They were admitted, and failed later; healthy is none at all. Look in the log for `ended with an "
        "error`.",
        runbook=(
            "Find the request's id in the log, and what failed; /health tells whether the engine still lives.",
            "If it is one kind of request, keep it away from the other servers and report it.",
        ),
    ),
    Alert(
        name="Rejections",
        expr='sum without (reason) (rate(vllm:admission_rejections_total{reason!~"key_.*"}[5m])) > 0',
        hold="5m",
        severity="warning",
        summary='{{ $labels.instance }} turns away {{ printf "%.2f" $value }} requests a second.',
        description="Clients get 503 with Retry-After, or their request is given up at its deadline. Look at "
        "“Rejections”: the reason tells which limit it is. Those of single keys do not count here.",
        runbook=(
            "queue_full, queue_tokens_full: the server is full for longer than a burst. Add a server, or raise "
            "--max-queued-requests and --max-queued-tokens if clients would rather wait.",
            "queue_timeout: the queue is longer than its deadline. Lower --max-queued-tokens: a quick no is better "
            "than a late one.",
            "request_timeout: answers take too long; see “E2E latency” and clients' max_tokens.",
            "draining: clients still come to a server that stops; have the balancer look at /ready.",
        ),
    ),
    Alert(
        name="UnknownKeys",
        expr='rate(pointsman:access_refusals_total{reason="unknown_key"}[10m]) * 60 > 1',
        hold="15m",
        severity="info",
        summary="{{ $labels.instance }} is asked {{ $value | humanize }} times a minute with a key that it does not "
        "know.",
        description="Somebody tries keys, or a client has an old one. Nobody is let in by it. Look at “HTTP requests "
        "by status”, and in the log at whose requests end with 401.",
        runbook=(
            "If keys were changed lately, find the client that was forgotten.",
            "If not, keep that address away: the server compares keys in constant time, but has no list of bad guests.",
        ),
    ),
    Alert(
        name="AbortRate",
        expr=f"{_ABORTED} / {_ENDED} > {ABORT_SHARE} and {_ENDED} > {MIN_ENDED}",
        hold="15m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the requests on {{ $labels.instance }} are given up by their "
        "clients.",
        description="Clients leave before they have their answer: mostly a timeout somewhere on the way. Look at "
        "“TTFT” and “E2E latency”: a peak of aborts at one duration is a timeout.",
        runbook=(
            "Compare how long they waited (the log's line of each request) with the timeouts of clients and proxies.",
            "If they wait in the queue, follow PointsmanQueueBacklog; if answers are long, have clients stream.",
            "If one client does it, it may send everything twice: its id is in the log.",
        ),
    ),
    Alert(
        name="PrefixHitDrop",
        expr=f"{_hit_ratio('[30m]')} < {POOR_HIT_RATIO:g} and {_hit_ratio('[6h] offset 30m')} > {HEALTHY_HIT_RATIO:g}",
        hold="15m",
        severity="warning",
        summary="Only {{ $value | humanizePercentage }} of the prompt tokens on {{ $labels.instance }} are found in "
        "the prefix cache; it was twice as much and more.",
        description="Prompts that shared their beginnings do so no longer, or their blocks are evicted. Each miss is "
        "computed. Look at “Prefix cache hits” beside “KV cache usage”.",
        runbook=(
            "If “KV cache usage” is high, shared blocks are evicted before they are asked for: enlarge the pool.",
            "If it is not, prompts have changed: a date or a name at the head of a system prompt makes each one new.",
            "Behind a balancer, have it send equal beginnings to the same server.",
        ),
    ),
)

PROCESS_ALERTS = (
    Alert(
        name="OpenFiles",
        expr=f"process_open_fds / process_max_fds > {FILES_SHARE}",
        hold="5m",
        severity="critical",
        summary="{{ $labels.instance }} has {{ $value | humanizePercentage }} of the files and sockets open that it "
        "may.",
        description="Beyond the limit no connection can be accepted. Each client's connection is one, idle ones "
        "included. Look at “Open files” beside the live ones in “Requests running”.",
        runbook=(
            "If live requests are as many, raise the limit: `LimitNOFILE=` for systemd, `ulimits` for compose.",
            "If they are few, connections stay open: see with `ss -tnp` whose they are.",
        ),
    ),
    Alert(
        name="MemoryGrowth",
        expr=f"deriv(process_resident_memory_bytes[1h]) * 3600 / 1048576 > {MEMORY_MIB_PER_HOUR}",
        hold="2h",
        severity="warning",
        summary="The memory of {{ $labels.instance }} has been growing by {{ $value | humanize }} MiB an hour for "
        "hours.",
        description="The KV pool and the weights are taken at the start; what grows later should level off. Look at "
        "“Memory” over a day.",
        runbook=(
            "See whether it levels off: parts of the KV pool are touched for the first time under the first real load.",
            "Compare with traffic: memory that grows by the request is a leak; please report it, with the soak's "
            "figures.",
            "Restart the server at a quiet time, before the container's limit does it at a bad one.",
        ),
    ),
)

"""Signs that the scheduler cannot do its work well, and what each tells apart from the others.

Waiting requests have one of four reasons: the pool is full, all places are taken, something holds them back, or they
are left over. Each alert excludes the ones that explain more.
"""

from __future__ import annotations

from server.monitoring.alert import Alert
from server.monitoring.thresholds import CAPPED, KV_FREE, KV_FULL, PREEMPTED_SHARE

_WAITING = "min_over_time(vllm:num_requests_waiting[5m]) > 0"
_CAPPED = f"avg_over_time(vllm:num_requests_running[5m]) >= {CAPPED} * pointsman:max_num_seqs"
_KV_FULL = f"avg_over_time(vllm:kv_cache_usage_perc[5m]) > {KV_FULL}"

SCHEDULER_ALERTS = (
    Alert(
        name="KVStarvation",
        expr=f"{_KV_FULL} and rate(vllm:num_preemptions_total[5m]) > 0",
        hold="5m",
        severity="critical",
        summary="{{ $labels.instance }} starves for KV blocks: {{ $value | humanizePercentage }} in use, and it "
        "preempts.",
        description="The KV cache is full and running requests keep losing their blocks, so that work is computed "
        "again instead of finished. Look at “KV cache usage”, “Preemptions” and “Requests running”, side by side.",
        runbook=(
            "Lower --max-num-seqs, so that fewer requests share the pool: to about the number that runs while "
            "preemptions are flat. Throughput rises, since nothing is computed twice.",
            "If there is memory, give the pool more with --kv-cache-bytes, or halve what a token takes with "
            "--kv-cache-dtype int8.",
            "If requests are longer than they need to be, lower --max-model-len or clients' max_tokens.",
            "Otherwise add a server.",
        ),
    ),
    Alert(
        name="KVCacheFull",
        expr=_KV_FULL,
        hold="10m",
        severity="warning",
        summary="{{ $labels.instance }} has {{ $value | humanizePercentage }} of its KV blocks in use.",
        description="There is no room for another request until one ends; the next burst will preempt. Look at “KV "
        "cache usage” and at “Requests waiting by reason”: capacity means this.",
        runbook=(
            "See whether preemptions rise, too; if so, follow PointsmanKVStarvation.",
            "Give the pool more memory with --kv-cache-bytes, or lower --max-num-seqs.",
            "If usage stays up while nothing runs, follow PointsmanLeakedBlocks.",
        ),
    ),
    Alert(
        name="PreemptionRate",
        expr="increase(vllm:num_preemptions_total[15m]) "
        f"/ sum without (finished_reason) (increase(vllm:request_success_total[15m])) > {PREEMPTED_SHARE}",
        hold="15m",
        severity="warning",
        summary="Preemptions on {{ $labels.instance }} are {{ $value | humanizePercentage }} of the requests it "
        "finishes.",
        description="A preempted request gives up its blocks and is computed again. Healthy is a flat line. Look at "
        "“Preemptions” and at “Resumed prefix hits”: the prefix cache gives back part of the work.",
        runbook=(
            "Lower --max-num-seqs, or raise --watermark, so that admission leaves room for what already runs to grow.",
            "Under --scheduling-policy priority, see whether urgent requests keep pushing out the others: that is what "
            "the policy promises.",
            "See that --enable-prefix-caching is on: without it all of a victim's work is lost.",
        ),
    ),
    Alert(
        name="CappedByMaxNumSeqs",
        expr=f"{_WAITING} and {_CAPPED}",
        hold="10m",
        severity="warning",
        summary="{{ $labels.instance }} runs as many requests as --max-num-seqs allows, and {{ $value | humanize }} or "
        "more wait.",
        description="Places are what is short, not memory. Look at “Requests running” beside its cap, and at “KV cache "
        "usage”: how far below 80 % it is says how much room there is.",
        runbook=(
            "If “KV cache usage” is below 80 %, raise --max-num-seqs step by step and watch the gap between tokens "
            "(“Inter-token latency”): it grows with the batch.",
            "If usage is higher, raising it would only preempt: add a server.",
            "If the gap between tokens is what matters, leave it, and limit the queue instead.",
        ),
    ),
    Alert(
        name="WaitingWithFreeKV",
        expr=f"{_WAITING} and max_over_time(vllm:kv_cache_usage_perc[5m]) < {KV_FREE} unless {_CAPPED}",
        hold="10m",
        severity="warning",
        summary="{{ $value | humanize }} or more requests wait on {{ $labels.instance }}, which has places and KV "
        "blocks free.",
        description="Nothing that is counted explains the waiting: requests have leaked, or something holds them back. "
        "Look at “Requests waiting by reason”, at the live ones in “Requests running” and at the aborts in “Requests "
        "by their end”.",
        runbook=(
            "If more requests run and wait than are live, they have leaked: follow PointsmanLeakedRequests.",
            "If the reason is deferred, a rule holds them back: --delay-factor, or an adapter that others occupy. Set "
            "--delay-factor 0.",
            "If prompts are long, steps are full: “Tokens a step” stands at --max-num-batched-tokens. Raise that.",
            "If one long request waits at the head, the policy lets nobody past it: it needs most of the pool.",
        ),
    ),
    Alert(
        name="PrefillStarvation",
        expr=f"{_WAITING} and rate(pointsman:prompt_tokens_scheduled_total[5m]) == 0 unless ({_CAPPED} or {_KV_FULL})",
        hold="5m",
        severity="critical",
        summary="No prompt has been computed on {{ $labels.instance }} for minutes, while {{ $value | humanize }} or "
        "more requests wait.",
        description="There is room, yet nobody is admitted: waiting requests starve. Look at “Tokens a step” (prompt "
        "tokens stand at 0) and at “Requests waiting by reason”.",
        runbook=(
            "If the reason is deferred, a rule sets everybody aside: --delay-factor, or adapters in conflict.",
            "Under --scheduling-policy priority, more urgent requests may take every place: raise the priority of "
            "those that wait, or set --scheduling-policy fcfs.",
            "See in the log whether a request of an earlier minute never ended.",
            "Keep the metrics page and the log, then restart the server: clients get an error and may try again.",
        ),
    ),
    Alert(
        name="LeakedRequests",
        expr="vllm:num_requests_running + vllm:num_requests_waiting > pointsman:num_live_requests",
        hold="5m",
        severity="warning",
        summary="{{ $labels.instance }} works on {{ $value | humanize }} requests, more than anybody waits for.",
        description="Requests go on in the engine although their clients have their answer or have left. They take "
        "places and KV blocks from others. Look at the live ones in “Requests running”.",
        runbook=(
            "Keep the metrics page and the log; this is a fault of the server, please report it.",
            "Restart the server when its load allows: only that gives the places back.",
        ),
    ),
    Alert(
        name="LeakedBlocks",
        expr="min_over_time(vllm:kv_cache_usage_perc[5m]) > 0 and max_over_time(vllm:num_requests_running[5m]) == 0",
        hold="5m",
        severity="warning",
        summary="{{ $labels.instance }} holds {{ $value | humanizePercentage }} of its KV blocks for nobody.",
        description="Nothing runs, yet blocks have an owner: the pool has become smaller. Look at “KV cache usage” "
        "while the server is idle.",
        runbook=(
            "Keep the metrics page and the log; this is a fault of the server, please report it.",
            "Restart the server when its load allows: only that gives the blocks back.",
        ),
    ),
)

"""vllm-htop, vllmstat and vllm-top read a running server: `check_monitors.py URL`."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from checking import check, equal, fetch_json, holds, metric, model_name, run_checks, wait_until_idle

URL = sys.argv[1]
MODEL = model_name(URL)
ADDRESS = urlsplit(URL)
PERCENTILES = ("p50", "p90", "p99")


def run(*command: str) -> str:
    """Run one of the tools and return what it printed."""
    path = Path(sys.executable).with_name(command[0])
    done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=60, check=False)
    equal((done.returncode, done.stderr), (0, ""))
    return done.stdout


def read_htop() -> dict[str, Any]:
    (replica,) = json.loads(run("vllm-htop", "--url", URL, "--once", "--output", "json"))["replicas"]
    return dict(replica)


def read_vllmstat() -> dict[str, Any]:
    return dict(json.loads(run("vllmstat", "-u", URL, "--once", "--json", "--no-gpu")))


def have_values(found: dict[str, Any], *names: str) -> None:
    """Fail with the names of those fields that are missing or null."""
    equal([name for name in names if found.get(name) is None], [])


@contextlib.contextmanager
def running_request() -> Iterator[None]:
    """One request that runs for as long as the block does."""
    connection = http.client.HTTPConnection(ADDRESS.netloc, timeout=60)
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    try:
        yield
    finally:
        connection.close()
        answer.close()
        wait_until_idle(URL)


@check
def requests_come_first() -> None:
    # The second finds the first one's prefix in the cache, so that every share has something to show.
    for prompt in ("word " * 200, "word " * 200 + "more"):
        fetch_json(f"{URL}/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 8})
    wait_until_idle(URL)


@check
def vllm_htop_reads_an_idle_server() -> None:
    found = read_htop()
    equal((found["status"], found["model"], found["running"], found["waiting"]), ("OK", MODEL, 0, 0))
    have_values(found, "kv_pct", "prefix_cache_hit_pct_lifetime")
    for kind in ("ttft", "tpot", "e2e"):
        have_values(found["latency_seconds"][kind], "p50", "p95", "p99")
    have_values(found["latency_seconds"]["queue"], "p95")
    holds(all(found["lifetime"].values()), found["lifetime"])
    equal(found["lifetime"]["requests_total"], metric(URL, "vllm:request_success_total"))


@check
def vllmstat_reads_an_idle_server() -> None:
    found = read_vllmstat()
    equal((found["connected"], found["error"], found["model_names"]), (True, None, [MODEL]))
    equal((found["running"], found["waiting"], found["kv_usage"]), (0, 0, 0))
    names = ["max_model_len", "prefix_caching_enabled", "prefix_hit_lifetime", "tokens_per_iter", "preempt_rate"]
    names += ["src_compute", "src_cache_hit", "src_external", "cached_tokens_total"]
    names += ["kv_capacity_tokens", "kv_dtype", "goodput_ttft", "goodput_tpot", "max_prompt_tokens"]
    have_values(found, *names, "max_output_tokens")
    for kind in ("ttft", "tpot", "e2e", "queue", "prefill", "decode", "prompt_len", "gen_len"):
        have_values(found[kind], *PERCENTILES)
    holds(found["cached_tokens_total"] > 0, found["cached_tokens_total"])
    holds(found["max_model_len"] <= found["kv_capacity_tokens"], found["kv_capacity_tokens"])


@check
def a_running_request_is_seen() -> None:
    with running_request():
        htop, stat = read_htop(), read_vllmstat()
        top = run("vllm-top", "--host", str(ADDRESS.hostname), "--port", str(ADDRESS.port), "--snapshot")
    equal((htop["running"], stat["running"]), (1, 1))
    holds(htop["kv_pct"] > 0 and stat["kv_usage"] > 0, (htop["kv_pct"], stat["kv_usage"]))
    running = next(line for line in top.splitlines() if line.startswith("Running Requests"))
    holds(running.split("|")[-1].strip().startswith("1.0/"), running)


@check
def vllm_top_reads_what_the_server_counts() -> None:
    page = run("vllm-top", "--host", str(ADDRESS.hostname), "--port", str(ADDRESS.port), "--snapshot")
    holds(f"Model: {MODEL}" in page, page)
    for title, name in (("Prompt", "prompt"), ("Generation", "generation")):
        line = next(line for line in page.splitlines() if line.startswith(f"Total {title} Tokens:"))
        equal(int(line.split(":")[1].replace(",", "")), int(metric(URL, f"vllm:{name}_tokens_total")))
    # It shows a 0 where this old name is missing, so the page cannot tell.
    equal(metric(URL, "vllm:gpu_cache_usage_perc"), metric(URL, "vllm:kv_cache_usage_perc"))


if __name__ == "__main__":
    run_checks()

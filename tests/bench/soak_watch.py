"""What a process costs while it is soaked: memory, files, threads from the kernel, the rest from its own metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

METRICS = {
    "num_tasks": "pointsman:event_loop_tasks",
    "num_running": "vllm:num_requests_running",
    "num_waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "num_tokens": "vllm:generation_tokens_total",
    "num_preemptions": "vllm:num_preemptions_total",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One look.

    Attributes:
        seconds: Since the soak began.
        anon_kib: Anonymous memory, resident and swapped out: what no file backs.
        num_files: Open file descriptors.
        num_threads: Threads.
        num_tasks: Tasks of the event loop.
        num_running: Requests.
        num_waiting: Requests.
        kv_usage: Share of the KV blocks in use.
        num_tokens: Generated so far.
        num_preemptions: So far.
        is_idle: Nothing was asked for at that moment.
    """

    seconds: float
    anon_kib: int
    num_files: int
    num_threads: int
    num_tasks: float
    num_running: float
    num_waiting: float
    kv_usage: float
    num_tokens: float
    num_preemptions: float
    is_idle: bool


class Watch:
    """Looks every so often on a thread of its own, and whenever it is asked to.

    Args:
        pid: Of the server.
        url: The server's.
        every_s: Between two looks.
        on_sample: Gets each, on whichever thread looked.

    Attributes:
        samples: In order.
    """

    def __init__(self, pid: int, url: str, *, every_s: float, on_sample: Callable[[Sample], None]) -> None:
        self.samples: list[Sample] = []
        self._pid = pid
        self._every_s = every_s
        self._on_sample = on_sample
        self._client = httpx.Client(base_url=url, timeout=60)
        self._started = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()

    def look(self, *, is_idle: bool) -> Sample:
        """Look once."""
        with self._lock:
            metrics = read_metrics(self._client.get("/metrics").text)
            sample = Sample(time.monotonic() - self._started, *read_process(self._pid), **metrics, is_idle=is_idle)
            self.samples.append(sample)
        self._on_sample(sample)
        return sample

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.look(is_idle=False)


def read_process(pid: int) -> tuple[int, int, int]:
    """Return anonymous memory in KiB, open files and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    anon, swap, threads = (int(status[name].split()[0]) for name in ("RssAnon", "VmSwap", "Threads"))
    return anon + swap, len(list(Path(f"/proc/{pid}/fd").iterdir())), threads


def read_metrics(page: str) -> dict[str, float]:
    """Return what is watched of a page of metrics, each summed over its labels."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if name in METRICS.values():
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return {field: sums[name] for field, name in METRICS.items()}

"""The path of a token from the scheduler to the socket, without a model: what it costs in CPU time, by stage.

    python tests/bench/http_path.py [--json FILE] [--chat] [--profile FILE]

A server with everything real but the model, and a client in another process. Three runs of 64 streams: steps that last
as long as those of a small model (each token is an event of its own, so that is what a token costs), the same with
answers of one token (what a request costs), and short steps (tokens per second; where the event loop falls behind the
engine, tokens share events). Then one stream alone: the time to its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from tests.bench.http_path_server import MODEL, run

PROMPT_WORDS = 32
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
_EVENT, _END = b'data: {"', b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Load:
    """What one run asks for.

    Attributes:
        num_requests: In all.
        num_streams: At once.
        max_tokens: Of each answer, which is exactly as long.
        is_chat: Over /v1/chat/completions.
    """

    num_requests: int
    num_streams: int
    max_tokens: int
    is_chat: bool = False


@dataclass(slots=True)
class Seen:
    """What the client saw."""

    num_events: int = 0
    first_event_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0


class _Stream(asyncio.Protocol):
    """One request on a connection of its own. Looks for no more than events in what comes."""

    def __init__(self, request: bytes, seen: Seen) -> None:
        self._request = request
        self._seen = seen
        self._started = 0.0
        self._tail = b""
        self._has_event = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._started = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        num_events = data.count(_EVENT)
        self._seen.num_events += num_events
        if num_events and not self._has_event:
            self._has_event = True
            self._seen.first_event_s.append(time.perf_counter() - self._started)
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        if _END in self._tail:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error or RuntimeError(f"The server sent no end: {self._tail!r}"))


def build_request(load: Load, seed: random.Random) -> bytes:
    """Return one request's bytes."""
    prompt = "".join(f" {seed.choice(_WORDS)}" for _ in range(PROMPT_WORDS))
    what = {"messages": [{"role": "user", "content": prompt}]} if load.is_chat else {"prompt": prompt}
    fields = {"model": MODEL, "max_tokens": load.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps({**what, **fields}).encode()
    path = "/v1/chat/completions" if load.is_chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def put_load(port: int, load: Load) -> Seen:
    """Run a load against the server on this port."""
    loop, seen, seed = asyncio.get_running_loop(), Seen(), random.Random(load.max_tokens)
    requests = [build_request(load, seed) for _ in range(load.num_requests)]

    async def work() -> None:
        while requests:
            request = requests.pop()
            _, stream = await loop.create_connection(partial(_Stream, request, seen), "127.0.0.1", port)
            await stream.ended

    started, cpu_started = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(load.num_streams)))
    seen.wall_s, seen.cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    return seen


@dataclass(frozen=True, slots=True)
class Server:
    """The server's process as seen from here."""

    port: int
    pipe: Connection

    def measure(self) -> dict[str, Any]:
        """Return its figures so far."""
        self.pipe.send("measure")
        figures: dict[str, Any] = self.pipe.recv()
        return figures

    def run(self, load: Load) -> tuple[Seen, dict[str, float]]:
        """Put a load on it; return what the client saw, and the server's CPU seconds by stage."""
        before = self.measure()["stages"]
        seen = asyncio.run(put_load(self.port, load))
        after = self.measure()["stages"]
        return seen, {stage: after[stage] - before[stage] for stage in after}


@contextmanager
def start_server(**options: Any) -> Iterator[Server]:
    """Start a server; options as http_path_server.run's."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(there,), kwargs=options)
    process.start()
    there.close()
    try:
        yield Server(here.recv(), here)
        here.send("")
        process.join(10)
    finally:
        process.kill()
        process.join()


def measure_costs(args: argparse.Namespace) -> dict[str, Any]:
    """Return microseconds of CPU per token and per request, by stage: the smallest of several runs."""
    long = Load(args.requests, args.streams, args.max_tokens, args.chat)
    short = Load(args.requests, args.streams, 1, args.chat)
    options = {"model": args.model, "max_num_seqs": args.streams, "step_s": args.step_ms / 1e3, "profile": args.profile}
    with start_server(**options) as server:
        server.run(short)  # warms caches up
        shorts = [server.run(short) for _ in range(args.repeat)]
        longs = [server.run(long) for _ in range(args.repeat)]
    _, per_request = min(shorts, key=lambda run: run[1]["total"])
    seen, total = min(longs, key=lambda run: run[1]["total"])
    num_tokens = long.num_requests * long.max_tokens
    num_more = num_tokens - long.num_requests
    return {
        "us_per_token": {stage: (total[stage] - per_request[stage]) / num_more * 1e6 for stage in total},
        "us_per_request": {stage: per_request[stage] / short.num_requests * 1e6 for stage in total},
        "events_per_token": seen.num_events / num_tokens,
        "client_us_per_token": seen.cpu_s / num_tokens * 1e6,
    }


def measure_speed(args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of short steps, and the time to the first token of a stream alone."""
    load = Load(args.requests, args.streams, args.max_tokens, args.chat)
    alone = Load(100, 1, 1, args.chat)
    step_s = args.short_step_ms / 1e3
    with start_server(model=args.model, max_num_seqs=args.streams, step_s=step_s, profile=None) as server:
        server.run(load)
        seen, _ = min((server.run(load) for _ in range(args.repeat)), key=lambda run: run[0].wall_s)
        first, _ = server.run(alone)
    num_tokens = load.num_requests * load.max_tokens
    return {
        "tokens_per_s": num_tokens / seen.wall_s,
        "events_per_token_of_short_steps": seen.num_events / num_tokens,
        "first_token_ms": {
            "alone": statistics.median(first.first_event_s) * 1e3,
            "among_all": statistics.median(seen.first_event_s) * 1e3,
        },
    }


def print_report(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print(f"{'CPU time (us)':22s} {'per token':>10s} {'per request':>12s}")
    for stage, us in figures["us_per_token"].items():
        print(f"{stage:22s} {us:10.2f} {figures['us_per_request'][stage]:12.1f}")
    print(
        f"events per token {figures['events_per_token']:.2f}; the client's CPU time "
        f"{figures['client_us_per_token']:.1f} us a token"
    )
    first, events = figures["first_token_ms"], figures["events_per_token_of_short_steps"]
    print(
        f"short steps: {figures['tokens_per_s']:.0f} tokens/s, {events:.2f} events per token; first token "
        f"{first['among_all']:.2f} ms, of a stream alone {first['alone']:.2f} ms"
    )


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description="What a token costs between the scheduler and the socket.")
    parser.add_argument("--json", metavar="FILE", help="Write the figures as JSON.")
    parser.add_argument("--model", help="Whose tokenizer. [default: the embedded model's]")
    parser.add_argument("--streams", type=int, default=64, help="Requests at once. [default: 64]")
    parser.add_argument("--requests", type=int, default=512, help="Requests a run. [default: 512]")
    parser.add_argument("--max-tokens", type=int, default=64, help="Tokens an answer. [default: 64]")
    parser.add_argument("--step-ms", type=float, default=8.0, help="How long a step lasts. [default: 8]")
    parser.add_argument("--short-step-ms", type=float, default=1.0, help="And a short one. [default: 1]")
    parser.add_argument("--repeat", type=int, default=3, help="Runs, of which the best counts. [default: 3]")
    parser.add_argument("--chat", action="store_true", help="Over /v1/chat/completions.")
    parser.add_argument("--profile", metavar="FILE", help="Write cProfile's figures of the event loop's thread.")
    args = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = {**measure_costs(args), **measure_speed(args)}
    print_report(figures)
    if args.json:
        Path(args.json).write_text(json.dumps(figures) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The whole application over the real scheduler and loop, stepped by hand; a fake model, callers that speak ASGI."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from engine_core import EngineCommand, EngineCoreRequest, EnginePhase, EngineSnapshot, EngineState
from engine_core.core import EngineCore
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.snapshot import TakeSnapshot
from engine_core.step_executor import DirectExecutor
from server.app import AppSettings, create_app
from server.engine_api import OnState, Publish
from server.in_proc_client import InProcEngineClient
from server.metrics import ServerMetrics
from server.output_processor import OutputProcessor
from server.overload.limits import Limits
from server.records import StepListeners
from server.status.feed import StatusSources
from tests.engine_core.fake_runner import FakeModelRunner
from tests.engine_core.scheduler.scheduler_helpers import create_scheduler
from tests.server.fake_engine import CharDecodeStream, char_bytes
from tests.server.http_helpers import MODEL, create_admission

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class ScheduledEngine:
    """An engine that takes a step when a test says so.

    Attributes:
        arrivals: Released once for each request that has come.
        has_command: Set once a command has come.
        num_computed: Tokens computed so far, by request.
        is_checking: Each step checks the scheduler's invariants.
    """

    def __init__(self, publish: Publish, on_state: OnState, **config: Any) -> None:
        self.scheduler = create_scheduler(**{"block_size": 4, "max_model_len": 1000, "num_blocks": 256, **config})
        self.arrivals = asyncio.Semaphore(0)
        self.has_command = asyncio.Event()
        self.num_computed: Counter[str] = Counter()
        self.is_checking = True
        pool = self.scheduler.kv_cache.pool
        self._runner = FakeModelRunner(num_blocks=pool.num_blocks, block_size=4)
        self._core = EngineCore(scheduler=self.scheduler, executor=DirectExecutor(self), publish=publish)
        self.state = EngineState(
            EnginePhase.READY, num_blocks=pool.num_blocks, block_size=4, max_model_len=self.scheduler.max_model_len
        )

    def start(self) -> None:
        """Nothing has to be loaded."""

    def add_request(self, request: EngineCoreRequest) -> None:
        self._core.add_request(request)
        self.arrivals.release()

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._core.abort_requests(tuple(request_ids))

    def ask(self, command: EngineCommand) -> Future[bool]:
        answer: Future[bool] = Future()
        self._core.ask(command, answer)
        self.has_command.set()
        return answer

    def take_snapshot(self) -> Future[EngineSnapshot] | None:
        answer: Future[EngineSnapshot] = Future()
        self._core.ask(TakeSnapshot(), answer)
        self._core._drain_input(block=False)
        return answer

    def seconds_since_progress(self) -> float:
        return 0.0

    def shutdown(self, timeout_s: float) -> bool:
        return True

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.num_computed.update(output.num_scheduled_tokens)
        return self._runner.execute(output)

    def step(self) -> None:
        """Do what the busy loop does once."""
        self._core._drain_input(block=False)
        if self._core._has_work():
            self._core.step()
        if self.is_checking:
            self.scheduler.check_invariants()

    @property
    def is_empty(self) -> bool:
        """Nothing runs or waits, and no block has an owner."""
        pool = self.scheduler.kv_cache.pool
        return not self.scheduler.has_unfinished_requests() and pool.num_free == pool.num_blocks


class Caller:
    """A client of the app that may leave at any time.

    Attributes:
        task: The app's work for it.
        messages: What the app has sent.
    """

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.messages: list[Message] = []
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        named = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), text.encode()) for name, text in named.items()],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        message = await self._incoming.get()
        if message["type"] == "http.disconnect":
            self.leave()  # whoever asks again hears it again, as from a real server
        return message

    async def _send(self, message: Message) -> None:
        self.messages.append(message)

    def leave(self) -> None:
        """Close the connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        """Of the answer, which has begun."""
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer, which has begun."""
        return {name.decode(): text.decode() for name, text in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        """Of the answer, as far as it has come."""
        return b"".join(message.get("body", b"") for message in self.messages)

    def read_chunks(self) -> list[dict[str, Any]]:
        """The chunks of a stream that has ended."""
        *events, done, end = self.body.decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


class ScheduledApp:
    """The application as `pointsman serve` puts it together, every middleware on.

    Args:
        limits: What it takes on.
        config: Fields of SchedulerConfig and KVCacheManager.
    """

    def __init__(self, *, limits: Limits | None = None, **config: Any) -> None:
        self.metrics = ServerMetrics("tiny")
        self.status_sources = StatusSources()
        listener = StepListeners(self.metrics, self.status_sources.history)
        processor = OutputProcessor(new_decode_stream=CharDecodeStream, token_bytes=char_bytes, metrics=listener)
        engines: list[ScheduledEngine] = []

        def create_engine(publish: Publish, on_state: OnState) -> ScheduledEngine:
            engines.append(ScheduledEngine(publish, on_state, **config))
            return engines[0]

        self.client = InProcEngineClient(create_engine, processor)
        self.client.start()
        (self.engine,) = engines
        self.app = create_app(
            engine_client=self.client,
            admission=create_admission(self.client),  # type: ignore[arg-type]
            metrics=self.metrics,
            settings=AppSettings(
                served_model_name=MODEL, version="1", system_fingerprint="fp", limits=limits or Limits()
            ),
            status_sources=self.status_sources,
        )

    async def ask(self, path: str = COMPLETIONS, *, headers: dict[str, str] | None = None, **fields: Any) -> Caller:
        """Send a request and return once the engine has its choices."""
        prompt = fields.pop("prompt", "abc")
        what = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
        body = {"ignore_eos": True, **what, **fields}
        caller = Caller(self.app, path, body, headers)
        for _ in range(fields.get("n", 1)):
            await self.engine.arrivals.acquire()
        return caller

    async def step(self, num_steps: int = 1) -> None:
        """Take steps and deliver each."""
        for _ in range(num_steps):
            self.engine.step()
            # Once for the outputs to arrive, and once more for each of the tasks that they pass through.
            for _ in range(8):
                await asyncio.sleep(0)

    async def finish(self, *callers: Caller) -> None:
        """Take steps until these have their answers."""
        while not all(caller.task.done() for caller in callers):
            await self.step()
        for caller in callers:
            await caller.task

"""Runs the lines of a batch: a window of requests in flight, answers in the order of the lines. Knows no files."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

from server.batch.asgi_call import AppReply, post_json
from server.batch.held_bytes import HeldBytes
from server.batch.lines import BatchItem, BatchLineError, build_answer, build_refusal, parse_line

logger = logging.getLogger(__name__)

# Answers that wait for an earlier line may pile up to this many windows; then reading waits for that line.
_HELD_WINDOWS = 4
# Lines that are run and answers that wait, together; then reading waits as well. Their number alone is no bound: five
# windows of the largest lines would be 20 GB.
MAX_HELD_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class BatchTally:
    """What has been done.

    Attributes:
        num_lines: Lines whose answer was handed out.
        num_failed: Of those, the ones that hold anything but an answer with status 200.
        num_output_tokens: Generated, as the answers' usage counts them.
    """

    num_lines: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Outcome:
    text: bytes
    is_ok: bool = False
    num_output_tokens: int = 0


class BatchRunner:
    """One batch.

    Memory does not grow with the number of lines, but for a digest of each `custom_id`, which tells duplicates: about
    100 bytes a line. Lines in flight and answers that wait for an earlier line hold `max_held_bytes` together. On top
    come one line that waits for room, and what answers in flight turn out to be longer than their lines. A line that is
    larger than all the room goes through alone.

    Args:
        app: Answers each line.
        window: Requests in flight at once.
        is_engine_dead: Nothing that is not answered yet will ever be.
        max_held_bytes: As above.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        window: int,
        is_engine_dead: Callable[[], bool],
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._app = app
        self._held = HeldBytes(max_held_bytes)
        self._slots = asyncio.Semaphore(window)
        self._order: asyncio.Queue[asyncio.Task[_Outcome] | Exception | None] = asyncio.Queue(window * _HELD_WINDOWS)
        self._is_engine_dead = is_engine_dead
        self._seen_ids: set[bytes] = set()
        self._tasks: set[asyncio.Task[_Outcome]] = set()
        self.tally = BatchTally()

    async def run(self, lines: AsyncIterator[bytes | None], write_line: Callable[[bytes], None]) -> BatchTally:
        """Answer every line; cancelling it aborts what is in flight and keeps what was written.

        Args:
            lines: None stands for one that is too long.
            write_line: Gets the answers, in the order of the lines. What it raises, or `lines` does, ends the run.
        """
        feeder = asyncio.create_task(self._feed(lines))
        try:
            while (item := await self._order.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                self._take(await item, write_line)
        finally:
            feeder.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(feeder, *self._tasks, return_exceptions=True)
        return self.tally

    def _take(self, outcome: _Outcome, write_line: Callable[[bytes], None]) -> None:
        self.tally.num_lines += 1
        self.tally.num_failed += not outcome.is_ok
        self.tally.num_output_tokens += outcome.num_output_tokens
        write_line(outcome.text)
        self._held.exchange(len(outcome.text), 0)

    async def _feed(self, lines: AsyncIterator[bytes | None]) -> None:
        end: Exception | None = None
        try:
            number = 0
            async for line in lines:
                number += 1
                await self._held.take(len(line or b""))
                await self._slots.acquire()
                task = asyncio.create_task(self._answer(number, line))
                self._tasks.add(task)
                task.add_done_callback(self._end_task)
                await self._order.put(task)
        except Exception as error:
            end = error
        await self._order.put(end)

    def _end_task(self, task: asyncio.Task[_Outcome]) -> None:
        self._slots.release()
        self._tasks.discard(task)

    async def _answer(self, number: int, line: bytes | None) -> _Outcome:
        line_id = f"batch_req_{uuid.uuid4().hex}"
        num_bytes, custom_id = len(line or b""), None
        try:
            item = self._parse(line)
            del line  # its body is there once more in `item`, and the answer may take long
            custom_id = item.custom_id
            outcome = await self._ask(line_id, item)
        except BatchLineError as error:
            outcome = _Outcome(build_refusal(line_id, number, error))
        except Exception:
            # Whatever is wrong with one line, the others are answered.
            logger.exception("batch line %.60r failed", custom_id)
            failure = BatchLineError("internal_error", "The server failed on this line; its log says why.", custom_id)
            outcome = _Outcome(build_refusal(line_id, number, failure))
        self._held.exchange(num_bytes, len(outcome.text))
        return outcome

    async def _ask(self, line_id: str, item: BatchItem) -> _Outcome:
        self._check_engine(item)
        reply = await post_json(self._app, item.url, item.body)
        if reply.status == 503:
            self._check_engine(item)
        return _build_outcome(line_id, item, reply)

    def _parse(self, line: bytes | None) -> BatchItem:
        if line is None:
            raise BatchLineError("line_too_long", "The line is longer than this server reads; split its request.")
        item = parse_line(line)
        # The tasks start in the order of the lines, so it is the later of two that is refused.
        digest = hashlib.blake2b(item.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen_ids:
            raise BatchLineError("duplicate_custom_id", "An earlier line has this `custom_id`.", item.custom_id)
        self._seen_ids.add(digest)
        return item

    def _check_engine(self, item: BatchItem) -> None:
        if self._is_engine_dead():
            raise BatchLineError("engine_dead", "The engine died before this line was answered.", item.custom_id)


def _build_outcome(line_id: str, item: BatchItem, reply: AppReply) -> _Outcome:
    body = json.loads(reply.body)
    text = build_answer(
        line_id,
        item.custom_id,
        status=reply.status,
        request_id=reply.headers.get("x-request-id"),
        body=body,
    )
    if reply.status != 200:
        return _Outcome(text)
    return _Outcome(text, True, body["usage"]["completion_tokens"])

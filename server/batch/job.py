"""The process of a batch, from its open files to the exit code: engine up, lines through, engine down; signals."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI

from server.batch.files import BatchFileError, BatchInput, BatchOutput
from server.batch.progress import BatchProgress
from server.batch.runner import BatchRunner
from server.exit_codes import ExitCode
from server.in_proc_client import InProcEngineClient
from server.lifecycle.engine_run import EngineRun
from server.startup_report import StartupReport

# Twice what runs at once: the engine never waits for the next line to be tokenized.
_WINDOW_FACTOR = 2
# The work is left as it is, and there is nothing to wait for.
_CUT_SHORT = (ExitCode.INTERRUPTED, ExitCode.FILE_ERROR)


class BatchJob:
    """Runs one batch; use once.

    Args:
        client: Not yet started.
        app: The application over it.
        source: Its lines.
        output: Its answers.
        max_num_seqs: Requests that the engine runs at once.
        report: To the operator.
        hard_exit: Ends the process at once.
    """

    def __init__(
        self,
        *,
        client: InProcEngineClient,
        app: FastAPI,
        source: BatchInput,
        output: BatchOutput,
        max_num_seqs: int,
        report: StartupReport,
        hard_exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._engine = EngineRun(client, report, on_ready=lambda state: self._end_loading(), on_dead=self._end_loading)
        self._app = app
        self._source = source
        self._output = output
        self._window = max_num_seqs * _WINDOW_FACTOR
        self._report = report
        self._hard_exit = hard_exit
        self._reader = ThreadPoolExecutor(1, "batch-reader")
        self._is_reading = False
        self._loaded: asyncio.Future[bool] | None = None
        self._interrupted: asyncio.Event | None = None

    def run(self) -> ExitCode:
        """Run it on an event loop of its own; return how the process should end."""
        with asyncio.Runner() as runner:
            code = runner.run(self.execute())
        if code in _CUT_SHORT or not self._engine.is_gone or self._is_reading:
            # A thread may be inside the engine, tokenizing for long, or waiting for input that may never come.
            self._output.close()
            self._hard_exit(code)
        return code

    async def execute(self) -> ExitCode:
        """Run it on the running loop, which must be the main thread's; return how the process should end."""
        loop = asyncio.get_running_loop()
        self._loaded, self._interrupted = loop.create_future(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take_signal)
        self._engine.start()
        try:
            async with self._app.router.lifespan_context(self._app):
                return await self._race(self._answer_all())
        except BatchFileError as error:
            # Told here, not by the caller: run() may have to end the process.
            self._report.line(f"pointsman: {error}")
            return ExitCode.FILE_ERROR
        finally:
            await self._engine.stop()
            self._reader.shutdown(wait=False)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _race(self, work: Coroutine[Any, Any, ExitCode]) -> ExitCode:
        """Run the work, or cancel it when a signal comes."""
        assert self._interrupted is not None
        task = asyncio.create_task(work)
        interrupt = asyncio.create_task(self._interrupted.wait())
        await asyncio.wait((task, interrupt), return_when=asyncio.FIRST_COMPLETED)
        interrupt.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return ExitCode.INTERRUPTED

    async def _answer_all(self) -> ExitCode:
        assert self._loaded is not None
        if not await self._loaded:
            return self._engine.exit_code
        runner = BatchRunner(self._app, window=self._window, is_engine_dead=lambda: self._engine.is_dead)
        progress = BatchProgress(self._report, self._source)

        def write_line(line: bytes) -> None:
            self._output.write_line(line)
            progress.show(runner.tally)

        try:
            await runner.run(self._read_lines(), write_line)
            self._output.finish()
        except BaseException:
            self._tell_partial()
            raise
        finally:
            progress.end(runner.tally)
        if self._engine.is_dead:
            return self._engine.exit_code
        return ExitCode.SOME_FAILED if runner.tally.num_failed else ExitCode.OK

    async def _read_lines(self) -> AsyncIterator[bytes | None]:
        # In a thread of its own, not the loop's pool: nobody can interrupt a read, and closing the pool would wait.
        loop, lines = asyncio.get_running_loop(), iter(self._source)
        end = object()
        while True:
            self._is_reading = True
            line = await loop.run_in_executor(self._reader, next, lines, end)
            self._is_reading = False
            if line is end:
                return
            assert line is None or isinstance(line, bytes)
            yield line

    def _tell_partial(self) -> None:
        if self._output.partial_path is not None and self._output.num_lines:
            self._report.line(f"The first {self._output.num_lines:,} answers are in {self._output.partial_path}.")

    def _take_signal(self) -> None:
        assert self._interrupted is not None
        if self._interrupted.is_set():
            self._hard_exit(ExitCode.INTERRUPTED)
        self._report.line("Stopping; once more stops at once.")
        self._interrupted.set()

    def _end_loading(self) -> None:
        assert self._loaded is not None
        if not self._loaded.done():  # as it is after a signal, which cancels whoever waits for it
            self._loaded.set_result(self._engine.was_ready)

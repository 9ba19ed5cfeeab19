from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_core import EnginePhase, EngineState, FinishReason
from server.batch.files import open_files
from server.batch.job import BatchJob
from server.cli import build_parser, main
from server.config import build_config
from server.exit_codes import ExitCode
from server.in_proc_client import InProcEngineClient
from server.metrics import ServerMetrics
from server.output_processor import OutputProcessor
from server.startup_report import StartupReport
from tests.server.batch_files import build_line, numbered_lines, write_input
from tests.server.fake_engine import CharDecodeStream, FakeEngine, char_bytes, output
from tests.server.http_helpers import build_app


class AnsweringEngine(FakeEngine):
    """Answers each request at once with one token, until it is told to do something else."""

    def __init__(self, *callbacks: Any) -> None:
        super().__init__(*callbacks)
        self.on_request: Callable[[int], None] = lambda number: self.answer(number)
        self.on_shutdown: Callable[[], None] = lambda: None
        self.load: Callable[[], None] = lambda: self.set_state(
            EngineState(EnginePhase.READY, "", 1.0, num_blocks=16, block_size=8, max_model_len=64)
        )

    def start(self) -> None:
        self.load()

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self.on_request(len(self.requests))

    def shutdown(self, timeout_s: float) -> bool:
        self.on_shutdown()
        return super().shutdown(timeout_s)

    def answer(self, number: int) -> None:
        self.step(output("x", FinishReason.STOP, request_id=self.requests[number - 1].request_id))


class Job:
    """A BatchJob over files in a folder and an engine that the test drives."""

    def __init__(self, folder: Path, num_lines: int) -> None:
        self.text, self.hard_exits = io.StringIO(), list[int]()
        self.out = folder / "out.jsonl"
        self.input = write_input(folder, numbered_lines(num_lines))
        self.on_hard_exit: Callable[[], None] = lambda: None
        engines: list[AnsweringEngine] = []

        def create_engine(*callbacks: Any) -> AnsweringEngine:
            engines.append(AnsweringEngine(*callbacks))
            return engines[0]

        processor = OutputProcessor(
            new_decode_stream=CharDecodeStream, token_bytes=char_bytes, metrics=ServerMetrics("m")
        )
        self._client = InProcEngineClient(create_engine, processor)
        self.engine = engines[0]

    def run(self) -> ExitCode:
        with open_files(str(self.input), str(self.out), force=False) as (source, target):
            self.source = source
            job = BatchJob(
                client=self._client,
                app=build_app(self._client),  # type: ignore[arg-type]
                source=source,
                output=target,
                max_num_seqs=1,
                report=StartupReport(self.text),
                hard_exit=self._take_hard_exit,
            )
            return job.run()

    def _take_hard_exit(self, code: int) -> None:
        self.hard_exits.append(code)
        self.on_hard_exit()

    def read_answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    @property
    def partial(self) -> Path:
        return self.out.with_name("out.jsonl.partial")


def test_a_job_runs_from_file_to_file_and_stops_the_engine(tmp_path: Path) -> None:
    job = Job(tmp_path, 9)
    assert job.run() is ExitCode.OK
    assert [answer["custom_id"] for answer in job.read_answers()] == list("123456789")
    assert "9/9 lines, 9 tokens," in job.text.getvalue()
    assert job.engine.shutdown_timeouts == [5.0]
    assert job.hard_exits == []
    assert not job.partial.exists()


def test_a_job_with_a_failed_line_ends_with_1(tmp_path: Path) -> None:
    job = Job(tmp_path, 70)  # the last ones do not fit into 64 tokens of context
    assert job.run() is ExitCode.SOME_FAILED
    assert job.read_answers()[-1]["response"]["status_code"] == 400


def test_ctrl_c_keeps_the_answers_so_far_under_the_partial_name(tmp_path: Path) -> None:
    job = Job(tmp_path, 9)

    def interrupt_at_fourth(number: int) -> None:
        if number == 4:  # two are in flight at once: the first two have long been written
            os.kill(os.getpid(), signal.SIGINT)
        elif number < 3:
            job.engine.answer(number)

    job.engine.on_request = interrupt_at_fourth
    assert job.run() is ExitCode.INTERRUPTED
    assert not job.out.exists()
    assert [json.loads(line)["custom_id"] for line in job.partial.read_text().splitlines()] == ["1", "2"]
    assert "The first 2 answers are in" in job.text.getvalue()
    assert job.hard_exits == [ExitCode.INTERRUPTED]


def test_a_full_disk_ends_the_job_at_once_with_its_sentence(tmp_path: Path) -> None:
    job = Job(tmp_path, 5)
    job.out = Path("/dev/full")
    assert job.run() is ExitCode.FILE_ERROR
    assert "The output cannot be written any further (No space left on device)." in job.text.getvalue()
    assert job.hard_exits == [ExitCode.FILE_ERROR]


def test_ctrl_c_while_loading_leaves_nothing_behind_and_does_not_wait(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.engine.load = lambda: os.kill(os.getpid(), signal.SIGINT)
    assert job.run() is ExitCode.INTERRUPTED
    assert job.engine.shutdown_timeouts == [0.0]
    assert job.source.num_lines == 0  # nothing is read that nobody can answer yet
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_ctrl_c_does_not_wait_for_input_that_may_never_come(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    line = job.input.read_bytes()
    job.input = tmp_path / "pipe"
    os.mkfifo(job.input)
    writer = os.open(job.input, os.O_RDWR)
    os.write(writer, line)
    # The second line is being waited for when the first one gets to the engine.
    job.engine.on_request = lambda number: os.kill(os.getpid(), signal.SIGINT)
    job.on_hard_exit = lambda: os.close(writer)
    assert job.run() is ExitCode.INTERRUPTED
    assert job.hard_exits == [ExitCode.INTERRUPTED]


@pytest.mark.parametrize(
    ("phase", "told"), [(EnginePhase.READY, []), (EnginePhase.DEAD, ["The model cannot be loaded: late"])]
)
def test_loading_that_ends_just_after_ctrl_c_raises_nothing(
    tmp_path: Path, phase: EnginePhase, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, 1)
    complaints: list[dict[str, Any]] = []

    def load() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        os.kill(os.getpid(), signal.SIGINT)

    job.engine.load = load
    job.engine.on_shutdown = lambda: job.engine.set_state(EngineState(phase, "late"))
    assert job.run() is ExitCode.INTERRUPTED
    assert complaints == []
    assert job.text.getvalue() == "Stopping; once more stops at once.\n"
    assert [record.getMessage() for record in caplog.records] == told


def test_the_engines_death_is_in_every_line_that_it_left_and_in_the_exit_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, 5)
    job.engine.on_request = lambda number: job.engine.answer(number) if number < 3 else job.engine.die("a step failed")
    assert job.run() is ExitCode.ENGINE_DIED
    answers = job.read_answers()
    assert [answer["error"]["code"] for answer in answers[2:]] == ["engine_dead"] * 3
    assert all(answer["response"]["status_code"] == 200 for answer in answers[:2])
    assert "The engine has died: a step failed" in caplog.text


def test_a_model_that_cannot_be_loaded_leaves_no_output(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path, 2)
    job.engine.load = lambda: job.engine.die("2 GiB are free")
    assert job.run() is ExitCode.ENGINE_DIED
    assert "The model cannot be loaded: 2 GiB are free" in caplog.text
    assert not job.out.exists() and not job.partial.exists()


def test_the_command_takes_serves_flags_but_those_of_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = build_parser().parse_args(["batch", "in", "-", "model.gguf", "--no-enable-chunked-prefill"])
    assert (arguments.input, arguments.output, arguments.model) == ("in", "-", "model.gguf")
    assert arguments.enable_chunked_prefill is False
    assert build_config(vars(arguments), {"POINTSMAN_HOST": "0.0.0.0", "POINTSMAN_MAX_NUM_BATCHED_TOKENS": "8192"})
    with pytest.raises(SystemExit):
        build_parser().parse_args(["batch", "in", "out", "--port", "1"])


def test_a_taken_output_is_found_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_input(tmp_path, [build_line("a")])
    (tmp_path / "out").write_text("dear")
    assert main(["batch", str(path), str(tmp_path / "out"), "/no/such/model"]) == 74
    assert capsys.readouterr().err.endswith("or overwrite it with --force.\n")

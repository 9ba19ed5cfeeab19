"""The program as it is run: the real command line against a stub on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli import main
from tests.server.bench.stub_server import END, HEAD, Answer, StubServer, event, obey, plain, say, token

ROOT = Path(__file__).parents[3]
SMALL = ("--requests", "4", "--concurrency", "2", "--prompt-tokens", "8", "--output-tokens", "3")


class StubThread:
    """A StubServer whose event loop runs in another thread."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._ready.wait()
        self.url = self.server.target.url

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with StubServer(self._answer) as self.server:
            self._ready.set()
            await self._end.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


@pytest.fixture
def stub() -> Iterator[StubThread]:
    thread = StubThread(obey)
    yield thread
    thread.close()


def run(answer: Answer, *argv: str) -> int:
    thread = StubThread(answer)
    try:
        return main(["bench", thread.url, *argv])
    finally:
        thread.close()


def test_a_load_prints_its_figures(stub: StubThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", stub.url, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("4 complete, 0 failed in ")
    assert "tokens: 32 of prompts (0 from the cache), 12 of answers\n" in out
    assert f"{stub.url}, stub: 4 requests, 2 at a time: prompts of 8 tokens, answers of 3\n" in err
    # The models, one to warm up, and the load; no two prompts alike.
    assert len(stub.server.requests) == 6
    assert len({request.body.get("prompt") for request in stub.server.requests}) == 6


def test_json_on_stdout_is_all_there_is(stub: StubThread, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "m", "--warmup", "0", "--rate", "1000", "--slo-ttft-ms", "60000", "--json", "-")
    assert main(["bench", stub.url, *SMALL[:2], *SMALL[4:], *flags]) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert (value["model"], value["url"], value["load"]["rate"]) == ("m", stub.url, 1000.0)
    assert (value["num_output_tokens"], value["good_share"], value["slo"]["ttft_ms"]) == (12, 1.0, 60_000.0)
    assert set(value["ttft_ms"]) == {"p50", "p90", "p95", "p99", "max"}
    assert "4 complete, 0 failed" in err
    assert [request.first_line for request in stub.server.requests] == ["POST /v1/completions HTTP/1.1"] * 4


def test_json_goes_into_a_file(stub: StubThread, tmp_path: Path) -> None:
    assert main(["bench", stub.url, *SMALL, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["num_requests"] == 4


def test_a_file_that_cannot_be_written_is_told_and_the_figures_are_printed_all_the_same(
    stub: StubThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", stub.url, *SMALL, "--json", str(tmp_path / "no" / "out.json")]) == 74
    out, err = capsys.readouterr()
    assert "out.json cannot be written (No such file or directory)" in err
    assert out.startswith("4 complete, 0 failed in ")


def test_requests_that_are_refused_are_told_and_the_exit_code_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    answer = say(plain("400 Bad Request", b'{"error": {"message": "ignore_eos is unknown."}}'))
    assert run(answer, "--model", "m", *SMALL) == 1
    out = capsys.readouterr().out
    assert out.startswith("0 complete, 4 failed")
    assert "failed 4 times: the server answered 400: ignore_eos is unknown.\n" in out


def test_answers_of_another_length_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    async def stop_early(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token() + event("[DONE]") + END)

    assert run(stop_early, "--model", "m", *SMALL) == 1
    assert "warning: an answer has 1 tokens instead of 3 (counted by events" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "complaint"),
    [
        (["http://127.0.0.1:1"], 64, "nothing listens on 127.0.0.1 port 1. Is the server running?"),
        (["https://127.0.0.1:1"], 64, "is https"),
        (["--prefix-tokens", "256"], 64, "--prefix-tokens 256 leaves nothing of prompts of 256 tokens"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    argv: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == code
    err = capsys.readouterr().err
    assert complaint in err and err.startswith("pointsman: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--requests", "0"], "argument --requests: must be at least 1, not 0"),
        (["--rate", "inf"], "argument --rate: must be a finite number"),
        (["--rate", "2", "--concurrency", "3"], "not allowed with argument"),
    ],
)
def test_flags_are_checked(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *argv])
    assert complaint in capsys.readouterr().err


def test_the_help_tells_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert all(f"{code} = " in told for code in (0, 1, 64, 74, 130))


def test_the_server_settings_of_the_environment_are_no_matter(
    stub: StubThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_PORT", "high")
    assert main(["bench", stub.url, *SMALL]) == 0


def test_an_interrupt_ends_it_with_a_word_and_imports_no_torch() -> None:
    async def talk_on(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        if len(thread.server.requests) == 1:
            os.kill(process.pid, signal.SIGINT)
        while True:  # until the connection breaks
            writer.write(token())
            await writer.drain()
            await asyncio.sleep(0)

    program = (
        "import sys, server.cli as c\n"
        "try: code = c.main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    thread = StubThread(talk_on)
    command = [sys.executable, "-c", program, "bench", thread.url, "--model", "m", *SMALL, "--warmup", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        thread.close()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[1:] == ["Interrupted."]

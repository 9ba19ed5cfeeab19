"""A machine that fails the server: disks without room, a cgroup that kills it, a clock that jumps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.exit_codes import ExitCode
from tests.e2e.server_process import ServerProcess, free_port
from tests.system.clients import Stream, ask, read_stream, wait_until, wait_until_quiet
from tests.system.tools import need_program, need_root

FLAGS = ("--num-kv-blocks", "128", "--max-num-seqs", "16")
ROOT = Path(__file__).parents[2]
CGROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 3 << 30
# A service manager in a few lines: starts it again a moment after it has ended, and notes how.
SUPERVISOR = """
echo $$ > {cgroup}/cgroup.procs
for attempt in 1 2 3; do
  "$@" ; code=$?
  echo $code >> {codes}
  [ $code = 0 ] && exit 0
  sleep 0.5
done
"""


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB with some 100 KB left."""
    need_root("mounting a file system of 1 MB")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        (folder / "ballast").write_bytes(b"\0" * 900_000)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_for_the_log_costs_the_log_and_nothing_else(full_disk: Path) -> None:
    log = full_disk / "log"
    into_log = ("sh", "-c", f'exec "$@" >> {log} 2>&1', "sh")
    with ServerProcess(*FLAGS, "--log-level", "debug", prefix=into_log) as server:
        expected = read_stream(server.url, ask(32)).text
        (full_disk / "ballast2").touch()
        with (full_disk / "ballast2").open("ab", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
            while True:
                ballast.write(b"\0" * 4096)
        size = log.stat().st_size
        for _ in range(5):
            assert read_stream(server.url, ask(32)).text == expected
        assert log.stat().st_size <= size + 4096, "there was no room"
        wait_until_quiet(server)
    assert server.process.returncode == 0


def test_a_disk_that_is_full_from_the_start_is_no_obstacle(full_disk: Path) -> None:
    (full_disk / "more").write_bytes(b"\0" * 90_000)
    with (full_disk / "rest").open("ab", buffering=0) as rest, pytest.raises(OSError, match="No space"):
        while True:
            rest.write(b"\0" * 4096)
    (full_disk / "log").touch()
    into_log = ("sh", "-c", f'exec "$@" >> {full_disk}/log 2>&1', "sh")
    with ServerProcess(*FLAGS, prefix=into_log) as server:
        assert read_stream(server.url, ask(8)).is_done
    assert server.process.returncode == 0


def test_a_full_cache_costs_the_next_start_time_and_the_embedded_model(full_disk: Path, embedded_model: Path) -> None:
    (full_disk / "more").write_bytes(b"\0" * 90_000)
    cache = ("--cache-dir", str(full_disk))
    # The kernels are built elsewhere, for this process alone.
    with ServerProcess(str(embedded_model), *FLAGS, *cache) as server:
        assert read_stream(server.url, ask(8)).is_done
    assert server.process.returncode == 0
    without = subprocess.run(
        [sys.executable, "-m", "server", "serve", *cache, "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert without.returncode == ExitCode.NO_MODEL, without.stderr
    assert "--cache-dir" in without.stderr and "Traceback" not in without.stderr


def test_a_full_disk_for_a_batch_is_an_exit_code_and_a_sentence(full_disk: Path, tmp_path: Path) -> None:
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "SmolLM2-135M-Instruct", "prompt": "a", "max_tokens": 1, "logprobs": 5, "n": 8},
        }
        for i in range(400)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = [sys.executable, "-m", "server", "batch", str(source), str(full_disk / "out.jsonl"), *FLAGS]
    result = subprocess.run(batch, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == ExitCode.FILE_ERROR, result.stderr
    assert "No space left" in result.stderr and "Traceback" not in result.stderr
    assert not (full_disk / "out.jsonl").exists(), "half an output has not the whole one's name"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of version 1 that may take 3 GiB."""
    need_root("making a cgroup")
    if not (CGROUPS / "memory.limit_in_bytes").exists():
        pytest.fail(f"{CGROUPS} is not there: this test takes the memory controller of cgroups, version 1")
    folder = CGROUPS / f"pointsman-test-{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    try:
        yield folder
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text().strip(), 30)
        folder.rmdir()


def test_a_process_killed_for_its_memory_is_started_again(cgroup: Path, tmp_path: Path) -> None:
    codes, port = tmp_path / "codes", free_port()
    command = [sys.executable, "-m", "tests.system.faulty_server", "serve", *FLAGS, "--port", str(port)]
    env = {**os.environ, "FAULT": "60:eat", "FAULT_ONCE": str(tmp_path / "once")}
    script = SUPERVISOR.format(cgroup=cgroup, codes=codes)
    log = (tmp_path / "log").open("w")
    supervisor = subprocess.Popen(["bash", "-c", script, "supervisor", *command], env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url), 120)
        seen = Stream(url, ask(1000)).wait()
        assert seen.broken and not seen.is_done and seen.text, seen
        wait_until(lambda: is_ready(url), 120)
        assert codes.read_text().split() == [str(128 + signal.SIGKILL)]
        assert read_stream(url, ask(100)).finish_reason == "length", "the second process has no fault"
    finally:
        for pid in (cgroup / "cgroup.procs").read_text().split():
            if int(pid) != supervisor.pid:
                os.kill(int(pid), signal.SIGTERM)
        assert supervisor.wait(60) == 0, (tmp_path / "log").read_text()
        log.close()
    assert codes.read_text().split()[-1] == "0"


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_the_doctor_foretells_what_half_of_a_containers_memory_holds(cgroup: Path) -> None:
    inside = ("bash", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "bash")
    doctor = [*inside, sys.executable, "-m", "server", "doctor", "--port", "0", "--json"]
    asked = subprocess.run(doctor, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    memory = json.loads(asked.stdout)["memory"]
    assert memory["available_bytes"] < LIMIT_BYTES and memory["sized_by"] == "half of the free memory"
    with ServerProcess(prefix=inside) as server:
        page = httpx.get(server.url + "/metrics").text
        info = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info{"))
        num_blocks = int(info.split('num_gpu_blocks="')[1].split('"')[0])
    assert num_blocks == pytest.approx(memory["kv_blocks"], rel=0.05)


def test_a_clock_that_jumps_ends_nothing_early(tmp_path: Path) -> None:
    faketime = need_program("faketime", "faketime")
    library = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
    assert library is not None, f"{faketime} is here, its library is not"
    clock = tmp_path / "clock"
    clock.write_text("+0")
    env = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        # Only the wall clock may jump: no system's monotonic one does.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    with ServerProcess(*FLAGS, "--watchdog-timeout-s", "5", env=env) as server:
        expected = [read_stream(server.url, ask(200, prompt=f"Story {i}:")).text for i in range(3)]
        for jump in ("+30d", "-30d", "+0"):
            streams = [Stream(server.url, ask(200, prompt=f"Story {i}:")) for i in range(3)]
            for stream in streams:
                stream.wait_for_events(3)
            clock.write_text(jump)
            assert [stream.wait().text for stream in streams] == expected
            assert httpx.get(server.url + "/ready").status_code == 200
        created = read_stream(server.url, ask(1)).events[0]["created"]
        assert abs(created - time.time()) < 3600
        assert server.metric("vllm:e2e_request_latency_seconds_sum") < 600, "durations are the monotonic clock's"
        assert server.metric("vllm:inter_token_latency_seconds_sum") >= 0
        wait_until_quiet(server)
    assert server.process.returncode == 0

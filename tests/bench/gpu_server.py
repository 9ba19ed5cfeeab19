"""Stage `server`: `pointsman serve` end to end under the project's own load, on random weights of Qwen3-0.6B's shape.

Run as a program it is that server, for dry runs: its backend comes from the fakes.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from engine_core.model.arch import arch_from_config
from server.bench.client import BenchClient, fetch_model_name, run_in_loop
from server.bench.load import Load, run_load
from server.bench.summary import Summary, summarize
from server.bench.target import BenchError, Target
from tests.bench.gpu_device import Bench, build_machine
from tests.bench.gpu_models import CONFIGS, decode_floor, write_checkpoint
from tests.bench.peer_process import find_free_port

_START_S = 60.0
_POLL_S = 0.1
_END_S = 10.0


def run_server(bench: Bench) -> None:
    """Put 32 streams on it, then 128."""
    model = bench.pick("Qwen3-0.6B", "tiny")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        write_checkpoint(model, folder, bench.device)
        if not bench.is_dry:
            torch.cuda.empty_cache()
        started = time.perf_counter()
        with serving(folder, Path(scratch) / "server.log", is_dry=bench.is_dry) as target:
            bench.sink.add("server ready after", "s", [time.perf_counter() - started])
            name = run_in_loop(fetch_model_name(target))
            client = BenchClient(target, name, timeout_s=_START_S)
            for streams in bench.pick((32, 128), (2,)):
                _measure(bench, client, model, streams)


def _measure(bench: Bench, client: BenchClient, model: str, streams: int) -> None:
    prompt_tokens, output_tokens = bench.pick((512, 128), (16, 3))
    load = Load(
        num_requests=streams * bench.pick(4, 1),
        concurrency=streams,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seed=streams,
    )
    run_in_loop(run_load(client, Load(num_requests=2, prompt_tokens=16, output_tokens=4, seed=-streams)))
    summary = summarize(run_in_loop(run_load(client, load)), load)
    if not summary.is_clean:
        errors = "; ".join(summary.errors) or "wrong lengths"
        bench.sink.note(f"{streams} streams", f"{summary.num_failed} requests failed: {errors}", is_failure=True)
    _tell(bench, summary, model, streams, prompt_tokens + output_tokens / 2)


def _tell(bench: Bench, summary: Summary, model: str, streams: int, context: float) -> None:
    """The floor of a gap between tokens is a decode step's; that of throughput follows from it."""
    floor = decode_floor(
        arch_from_config(CONFIGS[model]),
        batch=streams,
        context=context,
        bandwidth=bench.bandwidth,
        gemm_rate=bench.gemm_rate,
    )
    add = bench.sink.add
    label = f"server, {streams} streams"
    add(f"{label}: output", "tok/s", [summary.output_tokens_per_s])
    if summary.itl_ms:
        add(f"{label}: gap p50", "ms", [summary.itl_ms["p50"]], floor=floor.seconds * 1e3, formula=floor.formula)
        add(f"{label}: gap p99", "ms", [summary.itl_ms["p99"]])
        add(f"{label}: first token p50", "ms", [summary.ttft_ms["p50"]])
        add(f"{label}: first token p99", "ms", [summary.ttft_ms["p99"]])


@contextmanager
def serving(folder: Path, log: Path, *, is_dry: bool) -> Iterator[Target]:
    """Run a server on a checkpoint for the block.

    Raises:
        RuntimeError: It ended, or is not ready in time.
    """
    port = find_free_port()
    program = [str(Path(__file__).resolve())] if is_dry else ["-m", "server"]
    command = [sys.executable, *program, "serve", str(folder), "--backend", "cuda", "--port", str(port)]
    command += ["--max-num-seqs", "2", "--max-model-len", "512"] if is_dry else []
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, cwd=_root()) as process:
        try:
            target = Target("127.0.0.1", port)
            _wait_until_ready(process, target, log)
            yield target
        except BaseException:
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)  # into the stage's own log
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], target: Target, log: Path) -> None:
    deadline = time.perf_counter() + _START_S
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: {_last_line(log)}")
        if _is_ready(target):
            return
        time.sleep(_POLL_S)
    raise RuntimeError(f"the server is not ready after {_START_S:.0f} s: {_last_line(log)}")


def _is_ready(target: Target) -> bool:
    """Ask /ready."""

    async def ask() -> bool:
        reader, writer = await asyncio.open_connection(target.host, target.port)
        try:
            writer.write(target.build_get("/ready"))
            await writer.drain()
            return b" 200 " in await reader.readline()
        finally:
            writer.close()

    try:
        return run_in_loop(ask())
    except (OSError, BenchError):
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _root() -> str:
    return str(Path(__file__).resolve().parents[2])


def _serve_on_fakes() -> int:
    """Be `pointsman` with the fakes for a card: this process lies to all of its own parts."""
    import server.cli
    import server.serving
    from engine_core.model.compute import THIS_MACHINE
    from server.__main__ import main

    fakes = build_machine(is_dry=True)
    object.__setattr__(THIS_MACHINE, "survey_cuda", fakes.survey_cuda)
    object.__setattr__(THIS_MACHINE, "create_backend", fakes.create_backend)
    server.cli.survey_cuda = server.serving.survey_cuda = fakes.survey_cuda
    return main()


if __name__ == "__main__":
    sys.exit(_serve_on_fakes())

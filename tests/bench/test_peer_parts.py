"""The parts of peers.py, without a peer: loads on a fake, processes that are small scripts, reports of made-up runs."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from server.bench.load import build_prompts
from tests.bench.peer_catalog import PEERS, PeerFailure, Places, Start, default_homes
from tests.bench.peer_loads import LOADS, measure, scale_load
from tests.bench.peer_machine import CpuMeter, find_tree, measure_memory_bytes
from tests.bench.peer_process import PeerProcess
from tests.bench.peer_report import build_plot, build_table, describe_faults
from tests.bench.peers import _plan
from tests.server.bench.fake_completer import FakeCompleter

_ECHO = """
import json, sys
print("loading", flush=True)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    name = line.split()[0]
    if name == "W2":
        sys.exit("out of memory")
    if name == "W3":
        sys.stdin.read()
    print(json.dumps({"said": line.strip()}), flush=True)
"""


def driven(program: str, folder: Path, limit_s: float = 30.0) -> PeerProcess:
    start = Start([sys.executable, "-c", program], {}, 0, None, is_driven=True)
    return PeerProcess(start, folder / "log", limit_s=limit_s)


# ---------------------------------------------------------------------- loads
def test_no_two_loads_or_rounds_share_a_prompt() -> None:
    prompts = [
        prompt
        for name in LOADS
        for repeat in range(3)
        for prompt in build_prompts(scale_load(name, repeat=repeat).load)
    ]
    assert len(set(prompts)) == len(prompts)


async def test_a_plain_load_is_measured() -> None:
    figures = await measure(FakeCompleter(), scale_load("W2", repeat=0))
    assert (figures["num_requests"], figures["num_failed"], figures["num_output_tokens"]) == (32, 0, 32 * 128)


async def test_long_prompts_arrive_while_streams_run_and_count_apart() -> None:
    # Each look at the clock takes 2 s, in which the next long prompt becomes due: nothing is waited for in earnest.
    completer = FakeCompleter(step_s=2.0)
    figures = await measure(completer, scale_load("W5", repeat=0))
    assert (figures["num_requests"], figures["num_output_tokens"]) == (16, 16 * 256)
    lengths = [len(prompt.split()) for prompt in completer.prompts]
    assert lengths.count(32) == 16
    assert lengths.count(1_900) == figures["num_long_prompts"] >= 1
    assert figures["long_ttft_ms"]["p50"] >= 0.0


# ---------------------------------------------------------------------- processes
def test_a_driven_peer_answers_a_line_a_load(tmp_path: Path) -> None:
    with driven(_ECHO, tmp_path) as process:
        assert process.ready_s > 0.0
        assert process.run("W1", repeat=2, is_smoke=True) == {"said": "W1 2 1"}
        assert process.pid in find_tree(process.pid)
        assert measure_memory_bytes(process.pid) > 1_000_000
    assert process.is_dead
    assert (tmp_path / "log").read_bytes() == b"loading\n"


def test_a_peer_that_dies_says_what_it_said_last(tmp_path: Path) -> None:
    with driven(_ECHO, tmp_path) as process:
        with pytest.raises(PeerFailure, match=r"ended with 1; .*\nout of memory") as failure:
            process.run("W2", repeat=0, is_smoke=False)
        assert "loading" in str(failure.value)


def test_a_load_without_end_is_given_up(tmp_path: Path) -> None:
    with driven(_ECHO, tmp_path, limit_s=0.2) as process, pytest.raises(PeerFailure, match=r"no end within 0\.2 s"):
        process.run("W3", repeat=0, is_smoke=False)


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    start = Start([sys.executable, "-c", "raise SystemExit('no such model')"], {}, 0, 0)
    with (
        pytest.raises(PeerFailure, match=r"ended with 1; .*\nno such model"),
        PeerProcess(start, tmp_path / "log", limit_s=1.0),
    ):
        pass


def test_processor_time_is_split_between_server_client_and_others() -> None:
    busy = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as process:
        try:
            meter = CpuMeter(process.pid)
            sum(range(3_000_000))
            cores = meter.read_cores()
        finally:
            process.kill()
    assert set(cores) == {"server_cores", "client_cores", "foreign_cores"}
    assert cores["client_cores"] > 0.0 and cores["foreign_cores"] >= 0.0


# ---------------------------------------------------------------------- catalog and plan
def test_a_peers_folder_is_told_by_a_variable_or_lies_in_the_cache() -> None:
    homes = default_homes({"POINTSMAN_PEER_VLLM": "/v", "XDG_CACHE_HOME": "/c"})
    assert homes["vllm"] == Path("/v")
    assert homes["llamacpp"] == Path("/c/pointsman/peers/llamacpp")


def test_a_peer_that_is_not_installed_says_where_it_was_looked_for(tmp_path: Path) -> None:
    places = Places(tmp_path, {name: tmp_path / name for name in default_homes()}, print)
    fault = PEERS["vllm"].find_fault(places)
    assert fault is not None and str(tmp_path / "vllm" / "bin" / "vllm") in fault
    assert PEERS["pointsman"].find_fault(places) is None


def test_in_each_round_the_peers_take_turns_with_each_checkpoint() -> None:
    turns = list(_plan([PEERS["pointsman"], PEERS["openvino"]], ("W1", "W6", "W2"), 2))
    assert [(turn.repeat, turn.model, turn.peer.name, turn.loads) for turn in turns] == [
        (repeat, *rest)
        for repeat in (0, 1)
        for rest in (
            ("smollm2", "pointsman", ("W1", "W2")),
            ("smollm2", "openvino", ("W1", "W2")),
            ("tiny", "pointsman", ("W6",)),
        )
    ]


# ---------------------------------------------------------------------- reports
def run(peer: str, load: str, rate: float, *, foreign: float = 0.0, failed: int = 0, repeat: int = 0) -> dict[str, Any]:
    figures = {
        "num_requests": 4,
        "num_failed": failed,
        "num_wrong_length": 0,
        "errors": {"the server answered 500": failed},
        "output_tokens_per_s": rate,
        "total_tokens_per_s": 2 * rate,
        "itl_ms": {"p50": 1e3 / rate, "p99": 2e3 / rate, "max": 3e3 / rate},
        "ttft_ms": {"p50": 100.0},
        "long_ttft_ms": {},
    }
    return {"peer": peer, "load": load, "repeat": repeat, "foreign_cores": foreign, "figures": figures}


def start(peer: str, memory_mb: int = 5_000) -> dict[str, Any]:
    sizes = {"memory_bytes": memory_mb << 20, "weight_bytes": 256 << 20, "pool_bytes": 4_096 << 20}
    return {"peer": peer, "model": "smollm2", "repeat": 0, "ready_s": 3.0, **sizes}


def rows(*runs: dict[str, Any], starts: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {row[0]: list(row[1:]) for row in build_table(runs, starts).rows}


def test_medians_are_of_quiet_runs_where_there_are_any() -> None:
    runs = [run("vllm", "W1", rate, foreign=foreign) for rate, foreign in ((10.0, 0.0), (1.0, 0.5), (30.0, 0.1))]
    assert rows(*runs, starts=[start("vllm")])["W1 one stream, tokens/s"][0] == "20.0"
    assert rows(runs[1], starts=[start("vllm")])["W1 one stream, tokens/s"][0] == "1.0*"
    assert describe_faults(runs) == ["vllm W1, round 1: others used 0.50 cores"]


def test_a_run_with_failures_does_not_count() -> None:
    bad = run("vllm", "W1", 99.0, failed=2)
    assert rows(bad, run("vllm", "W1", 10.0), starts=[start("vllm")])["W1 one stream, tokens/s"][0] == "10.0"
    assert rows(bad, run("pointsman", "W1", 1.0), starts=[start("vllm"), start("pointsman")])[
        "W1 one stream, tokens/s"
    ] == ["2 of 4 failed: the server answered 500", "1.0", "-"]


def test_a_load_that_did_not_end_says_so() -> None:
    lost = {"peer": "llamacpp", "load": "W5", "repeat": 1, "error": "no end within 300 s\nlog"}
    assert rows(lost, starts=[start("llamacpp")])["W5 longest gap, ms"][0] == "no end within 300 s"
    assert describe_faults([lost]) == ["llamacpp W5, round 2: no end within 300 s"]


def test_pointsman_is_compared_with_the_best_of_the_others_whichever_way_good_is() -> None:
    runs = [run("vllm", "W1", 20.0), run("openvino", "W1", 50.0), run("pointsman", "W1", 100.0)]
    runs += [run("pointsman-int8", "W1", 150.0), run("pointsman-int4", "W1", 200.0)]
    starts = [start(peer) for peer in ("pointsman", "pointsman-int8", "pointsman-int4", "vllm", "openvino")]
    told = rows(*runs, starts=starts)
    assert told["W1 one stream, tokens/s"][-1] == "2.00x / quantised 4.00x"
    assert told["W1 gap p50, ms"][-1] == "2.00x / quantised 4.00x"


def test_precisions_are_compared_with_their_like() -> None:
    runs = [run("llamacpp", "W1", 40.0), run("llamacpp-q4_0", "W1", 80.0)]
    runs += [run("pointsman", "W1", 100.0), run("pointsman-int8", "W1", 200.0)]
    starts = [start(peer) for peer in ("pointsman", "pointsman-int8", "llamacpp", "llamacpp-q4_0")]
    # bf16 to bf16; int8 to whatever is fastest.
    assert rows(*runs, starts=starts)["W1 one stream, tokens/s"][-1] == "2.50x / quantised 2.50x"


def test_pointsman_alone_is_compared_with_nobody() -> None:
    table = build_table([run("pointsman", "W1", 100.0)], [start("pointsman")])
    assert list(table.header) == ["", "pointsman"]


def test_memory_beyond_the_pool_is_told_where_it_can_be() -> None:
    name = "memory beyond weights and KV pool, MiB"
    assert rows(starts=[start("vllm")])[name][0] == "648"
    assert name not in rows(starts=[start("vllm", memory_mb=1_000)])


def test_the_plot_has_a_panel_for_rates_and_one_for_gaps() -> None:
    runs = [run(peer, load, 50.0) for peer in ("pointsman", "vllm") for load in ("W1", "W2")]
    svg = build_plot(runs, [start("pointsman"), start("vllm")])
    assert svg is not None
    ET.fromstring(svg)
    assert "tokens/s, log" in svg and "ms, log" in svg
    assert build_plot([], []) is None


def test_records_are_plain_json() -> None:
    assert json.loads(json.dumps(run("vllm", "W1", 1.0)))["peer"] == "vllm"

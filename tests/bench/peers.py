"""Pointsman beside vLLM, OpenVINO and llama.cpp: the same loads on the same cores, in turn, as table, plot and JSON.

    python tests/bench/peers.py [--only W1,W2] [--peer pointsman] [--repeat N] [--json FILE] [--plot FILE] [--smoke]

In every round each peer is started anew, timed until its first token, warmed up, put under its loads, and ended before
the next one starts. Medians are taken over the rounds. README.md beside this file tells how to install the peers.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from server.bench.results import RequestResult
from server.startup_report import StartupReport
from tests.bench.peer_catalog import PEERS, Peer, PeerFailure, Places, default_homes, find_versions
from tests.bench.peer_checkpoints import bench_cache_dir
from tests.bench.peer_loads import LOADS, OnResult
from tests.bench.peer_machine import CpuMeter, measure_memory_bytes
from tests.bench.peer_process import PeerProcess
from tests.bench.peer_report import MAX_FOREIGN_CORES, build_plot, build_table, describe_faults

_DEFAULT_LIMIT_S = 300.0
_BAR_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Turn:
    """One start of one peer: it runs the loads of one checkpoint."""

    peer: Peer
    model: str
    loads: tuple[str, ...]
    repeat: int


@dataclass(slots=True)
class Findings:
    """What came out so far; see peer_report."""

    records: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)


class Bar:
    """Shows how many of the loads are done: in place on a terminal, else a line each."""

    def __init__(self, report: StartupReport, num_loads: int) -> None:
        self._report = report
        self._num_loads = num_loads
        self._num_done = 0

    def show(self, text: str) -> None:
        filled = _BAR_WIDTH * self._num_done // max(self._num_loads, 1)
        line = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {self._num_done}/{self._num_loads} {text}"
        if self._report.is_terminal:
            self._report.overwrite(line)
        else:
            self._report.line(line)

    def step(self) -> None:
        self._num_done += 1

    def watch(self, text: str, num_requests: int) -> OnResult:
        """Show a load as it goes, on a terminal; return what is called at each result."""
        self.show(text)
        ended = itertools.count(1)

        def on_result(_: RequestResult) -> None:
            count = next(ended)
            if self._report.is_terminal:
                self.show(f"{text}, {count}/{num_requests} requests")

        return on_result


def main() -> None:
    """Run what was asked, print the table, write what was asked for."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    args = _parse_args()
    report = StartupReport()
    places = Places(args.cache, {**default_homes(), **args.home}, report.line, tuple(args.pointsman_flag))
    peers = list(_find_peers(args.peer, places, report))
    turns = list(_plan(peers, args.only, args.repeat))
    findings = Findings()
    bar = Bar(report, sum(len(turn.loads) for turn in turns))
    try:
        for turn in turns:
            _take_turn(turn, places, findings, bar, args)
    except KeyboardInterrupt:
        report.line("\nInterrupted: these are the runs so far.")
    bar.show("done\n")
    _write(args, places, findings, report)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pointsman and its peers under the same loads.")
    add = parser.add_argument
    add("--only", type=_names(LOADS), default=tuple(LOADS), metavar="W1,W2", help=f"Of {', '.join(LOADS)}.")
    add("--peer", type=_names(PEERS), default=tuple(PEERS), metavar="NAME,...", help=f"Of {', '.join(PEERS)}.")
    add("--repeat", type=int, default=3, metavar="N", help="Rounds. [default: 3]")
    add("--quantization", action="store_true", help="Pointsman in int8 and int4 too, whatever --peer says.")
    add("--json", metavar="FILE", help="Write everything as JSON; - = stdout, and nothing else there.")
    add("--plot", metavar="FILE", type=Path, help="Write an SVG.")
    add("--table", metavar="FILE", type=Path, help="Write the table in markdown, beside printing it.")
    add("--limit-s", type=float, default=_DEFAULT_LIMIT_S, metavar="S", help="A load is given up then. [default: 300]")
    add("--smoke", action="store_true", help="Two short requests a load, no warm-up: shows that all works.")
    add("--home", type=_home, action="append", default=[], metavar="NAME=DIR", help="Where a peer is installed.")
    add("--cache", type=Path, default=bench_cache_dir(), metavar="DIR", help="Where checkpoints are kept.")
    add("--pointsman-flag", action="append", default=[], metavar="FLAG", help="For pointsman serve; =--flag=value.")
    args = parser.parse_args()
    args.home = dict(args.home)
    if args.quantization:
        args.peer = tuple(dict.fromkeys([*args.peer, "pointsman-int8", "pointsman-int4"]))
    return args


def _names(known: Any) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _home(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if name not in default_homes() or not folder:
        raise argparse.ArgumentTypeError(f"must be NAME=DIR with a name of {', '.join(default_homes())}, not {text!r}")
    return name, Path(folder)


def _find_peers(names: Sequence[str], places: Places, report: StartupReport) -> Iterator[Peer]:
    for name in names:
        fault = PEERS[name].find_fault(places)
        if fault is None:
            yield PEERS[name]
        else:
            report.line(f"{name} is left out: {fault}")


def _plan(peers: Sequence[Peer], loads: Sequence[str], num_rounds: int) -> Iterator[Turn]:
    """Yield round after round; within one, checkpoint after checkpoint, and the peers in turn."""
    for repeat in range(num_rounds):
        for model in dict.fromkeys(LOADS[name].model for name in loads):
            wanted = tuple(name for name in loads if LOADS[name].model == model)
            for peer in peers:
                if model in peer.models:
                    yield Turn(peer, model, wanted, repeat)


def _take_turn(turn: Turn, places: Places, findings: Findings, bar: Bar, args: argparse.Namespace) -> None:
    peer, model = turn.peer, turn.model
    bar.show(f"{peer.name}: starting with {model}, round {turn.repeat + 1}")
    log = places.cache / "logs" / f"{peer.name}-{model}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = {"peer": peer.name, "model": model, "repeat": turn.repeat}
    try:
        start = peer.prepare(model, places)
        with PeerProcess(start, log, limit_s=args.limit_s) as process:
            begun |= {"ready_s": process.ready_s, "weight_bytes": start.weight_bytes, "pool_bytes": start.pool_bytes}
            findings.starts.append(begun)
            if not args.smoke:
                process.warm_up()
            for name in turn.loads:
                watch = bar.watch(f"{peer.name}: {name}, round {turn.repeat + 1}", LOADS[name].load.num_requests)
                findings.records.append(_run_load(process, turn, name, watch, is_smoke=args.smoke))
                bar.step()
            begun["memory_bytes"] = measure_memory_bytes(process.pid)
    except PeerFailure as failure:
        num_left = len(turn.loads) - sum(_is_of(turn, record) for record in findings.records)
        for name in turn.loads[len(turn.loads) - num_left :]:
            findings.records.append({"peer": peer.name, "load": name, "repeat": turn.repeat, "error": str(failure)})
            bar.step()
        if begun not in findings.starts:
            findings.starts.append(begun)


def _is_of(turn: Turn, record: dict[str, Any]) -> bool:
    return (record["peer"], record["repeat"]) == (turn.peer.name, turn.repeat) and record["load"] in turn.loads


def _run_load(process: PeerProcess, turn: Turn, name: str, on_result: OnResult, *, is_smoke: bool) -> dict[str, Any]:
    meter = CpuMeter(process.pid)
    record: dict[str, Any] = {"peer": turn.peer.name, "load": name, "repeat": turn.repeat}
    try:
        record["figures"] = process.run(name, repeat=turn.repeat, is_smoke=is_smoke, on_result=on_result)
    except PeerFailure as failure:
        if process.is_dead:
            raise
        record["error"] = str(failure)
    return {**record, **meter.read_cores()}


def _write(args: argparse.Namespace, places: Places, findings: Findings, report: StartupReport) -> None:
    machine = {**_describe_machine(), "peers": find_versions(places)}
    faults = describe_faults(findings.records)
    table = build_table(findings.records, findings.starts).to_markdown()
    heading = f"{machine['cpu']}, {machine['num_cpus']} cores, {machine['date']}, medians of {args.repeat}"
    heading += "".join(f"; {name} {version}" for name, version in machine["peers"].items())
    lines = [heading, "", table, ""]
    lines += [f"* = others used more than {MAX_FOREIGN_CORES} cores in every run.", *faults] if faults else []
    text = "\n".join(lines)
    if args.json == "-":
        report.line(text)
    else:
        print(text, flush=True)
    if args.table:
        args.table.write_text(text + "\n", encoding="utf-8")
    if args.plot and (svg := build_plot(findings.records, findings.starts)):
        args.plot.write_text(svg, encoding="utf-8")
    if args.json:
        value = {"machine": machine, "runs": findings.records, "starts": findings.starts}
        _write_json(args.json, value)


def _write_json(target: str, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def _describe_machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.machine()),
        "num_cpus": len(os.sched_getaffinity(0)),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()

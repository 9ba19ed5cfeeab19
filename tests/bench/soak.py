"""A soak: mixed load on a server of its own for half an hour, and what it leaves behind. `make soak` runs it.

The load comes in rounds of a minute; between two of them everything must be free again. Exit code 1 = something leaks
or went wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.soak_load import FLAGS, iter_plans
from tests.bench.soak_report import Soak, draw, find_problems, format_markdown, summarize
from tests.bench.soak_watch import Sample, Watch
from tests.e2e.server_process import ServerProcess
from tests.long.storm import Storm, Tally, ask_normally, wait_until_quiet

_ROUND_S = 60.0
_LOOK_EVERY_S = 2.0
_BAD_WORDS = (" ERROR ", " CRITICAL ", "Traceback")


class ProgressLine:
    """One line that is overwritten on a terminal; elsewhere a line for each round."""

    def __init__(self, total_s: float, tally: Tally, out: TextIO) -> None:
        self._total_s = total_s
        self._tally = tally
        self._out = out

    def show(self, sample: Sample) -> None:
        """Show how far the soak is."""
        is_terminal = self._out.isatty()
        if not is_terminal and not sample.is_idle:
            return
        minutes, seconds = divmod(int(sample.seconds), 60)
        text = (
            f"{minutes:3d}:{seconds:02d} of {self._total_s / 60:g} min  {self._tally.ends.total():,} requests  "
            f"{sample.num_tokens:,.0f} tokens  {sample.anon_kib / 1024:,.0f} MiB  {sample.num_files} files  "
            f"{sample.num_tasks:.0f} tasks  {len(self._tally.wrong)} wrong"
        )
        self._out.write(f"\r\x1b[K{text}" if is_terminal else f"{text}\n")
        self._out.flush()


def run_soak(*, minutes: float, num_streams: int, seed: int, out: TextIO) -> Soak:
    """Run one on a server of its own."""
    rng, tally, total_s = random.Random(seed), Tally(), minutes * 60
    progress = ProgressLine(total_s, tally, out)
    with ServerProcess(*FLAGS) as server:
        expected = ask_normally(server)
        watch = Watch(server.process.pid, server.url, every_s=_LOOK_EVERY_S, on_sample=progress.show)
        with watch:
            wait_until_quiet(server)
            now = watch.look(is_idle=True).seconds
            while now < total_s:
                _load(server, rng, tally, num_streams=num_streams, seconds=min(_ROUND_S, total_s - now))
                wait_until_quiet(server)
                now = watch.look(is_idle=True).seconds
        if ask_normally(server) != expected:
            tally.wrong.append("the ordinary answer is another one at the end")
    log_errors = [line.strip() for line in server.lines if any(word in line for word in _BAD_WORDS)]
    if server.process.returncode:
        log_errors.append(f"the server ended with {server.process.returncode}")
    return Soak(seed, num_streams, now, watch.samples, tally.ends, tally.wrong, log_errors)


def _load(server: ServerProcess, rng: random.Random, tally: Tally, *, num_streams: int, seconds: float) -> None:
    plans = iter_plans(rng, tally.ends.total(), seconds)
    storm = Storm(server.url, num_streams=num_streams, plans=plans)
    storm.tally = tally
    asyncio.run(storm.run())


def main() -> int:
    """Run one, write the report where asked, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=24, help="Clients at a time.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="Write figures and samples as JSON; - = stdout.")
    parser.add_argument("--markdown", metavar="FILE", help="Write the report there too.")
    parser.add_argument("--plot", metavar="FILE", help="Write the plot as SVG.")
    args = parser.parse_args()

    soak = run_soak(minutes=args.minutes, num_streams=args.streams, seed=args.seed, out=sys.stderr)
    report, problems = format_markdown(soak), find_problems(soak)
    print(report, file=sys.stderr if args.json == "-" else sys.stdout)
    if args.markdown:
        Path(args.markdown).write_text(report, encoding="utf-8")
    if args.plot:
        Path(args.plot).write_text(draw(soak), encoding="utf-8")
    if args.json:
        figures = {**summarize(soak), "problems": problems, "samples": [asdict(sample) for sample in soak.samples]}
        with sys.stdout if args.json == "-" else open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file)
            file.write("\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""What each precision costs in quality: perplexity of the embedded model on a public-domain text, against fp32.

    python tests/bench/perplexity.py [--only NAME] [--text FILE] [--window N] [--model MODEL] [--json FILE]

Starts a server per precision and has it score the same windows of tokens over HTTP, as anybody could.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from tests.bench.bench_report import Figures, Table
from tests.bench.progress import Progress
from tests.e2e.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
TEXT = Path(__file__).parent / "texts" / "frankenstein.txt"
REFERENCE = "fp32"
# In plain torch and fp32, with the weights' values as the file has them: what the other figures are held against.
_REFERENCE_FLAGS = ("--dtype", "fp32", "--quantization", "none", "--cpu-isa", "torch")
_WEIGHTS = {"bf16": "none", "int8": "int8", "int4": "int4", "auto": "auto"}
_INT8_KV = ("--kv-cache-dtype", "int8")

PRECISIONS: dict[str, tuple[str, ...]] = {
    REFERENCE: _REFERENCE_FLAGS,
    **{name: ("--quantization", kind) for name, kind in _WEIGHTS.items()},
    **{f"{name}, int8 KV": ("--quantization", kind, *_INT8_KV) for name, kind in _WEIGHTS.items()},
}


@dataclass(frozen=True, slots=True)
class Scored:
    """A text as one precision sees it.

    Attributes:
        logprobs: Of each token but the first of every window.
        weights_mib: Memory that the server says its weights take.
    """

    logprobs: list[float]
    weights_mib: float


def read_text(path: Path) -> str:
    """Return the text of a file without its first line, a comment that tells where the text comes from."""
    comment, _, text = path.read_text(encoding="utf-8").partition("\n")
    if not comment.startswith("#"):
        raise ValueError(f"{path} must begin with a line '# author, title, year, rights'")
    return text.strip()


def cut_windows(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """Cut tokens into windows of ``size``. A rest of one token is left out: it has nothing to be predicted from."""
    windows = [list(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    return [window for window in windows if len(window) > 1]


def perplexity(logprobs: Sequence[float]) -> float:
    """Return exp of the mean negative logprob."""
    return math.exp(-statistics.fmean(logprobs))


def mean_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the mean absolute difference of the same tokens' logprobs."""
    return statistics.fmean(abs(a - b) for a, b in zip(left, right, strict=True))


def parse_weights_mib(output: str) -> float:
    """Return what a server's start report says of its weights."""
    found = re.search(r"^\s+weights\s+([\d,]+) MiB$", output, re.MULTILINE)
    if found is None:
        raise ValueError(f"the start report does not say what the weights take:\n{output}")
    return float(found[1].replace(",", ""))


def build_figures(scored: dict[str, Scored]) -> dict[str, Figures]:
    """Return each precision's figures; the reference must be among them."""
    reference = scored[REFERENCE].logprobs
    base = perplexity(reference)
    return {
        name: {
            "perplexity": perplexity(line.logprobs),
            "ratio": perplexity(line.logprobs) / base,
            "mean_logprob_difference": mean_difference(line.logprobs, reference),
            "weights_mib": line.weights_mib,
        }
        for name, line in scored.items()
    }


def build_table(figures: dict[str, Figures]) -> Table:
    """Return the figures for people."""
    header = ("precision", "perplexity", f"to {REFERENCE}", "mean logprob difference", "weights (MiB)")
    rows = [
        (
            name,
            f"{line['perplexity']:.3f}",
            f"{line['ratio']:.4f}",
            f"{line['mean_logprob_difference']:.4f}",
            f"{line['weights_mib']:,.0f}",
        )
        for name, line in figures.items()
    ]
    return Table(header, rows)


def score_windows(client: httpx.Client, windows: Sequence[Sequence[int]]) -> list[float]:
    """Return the logprobs of all tokens but each window's first.

    Args:
        client: Of a server that is ready.
        windows: Token ids.
    """
    logprobs: list[float] = []
    for window in windows:
        body = {"prompt": list(window), "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0}
        scored = _post(client, "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
        assert len(scored) == len(window) and scored[0] is None, "a logprob for each token but the first"
        logprobs += scored[1:]
    return logprobs


def tokenize(client: httpx.Client, text: str) -> list[int]:
    """Return a text's token ids, as the served model has them."""
    token_ids: list[int] = _post(client, "/tokenize", {"prompt": text})["tokens"]
    return token_ids


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    if response.is_error:
        raise RuntimeError(f"{path} answered {response.status_code}: {response.text}")
    answer: dict[str, Any] = response.json()
    return answer


def _score(name: str, args: argparse.Namespace, text: str, progress: Progress) -> Scored:
    model = [args.model] if args.model else []
    flags = (*model, *PRECISIONS[name], "--no-enable-prefix-caching")
    progress.show(f"{name}: starting")
    with (
        ServerProcess(*flags, env={"PYTHONPATH": str(ROOT)}) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        windows = cut_windows(tokenize(client, text), args.window)
        progress.show(name)
        logprobs = score_windows(client, windows)
        weights_mib = parse_weights_mib(server.output)
    progress.advance(name)
    return Scored(logprobs, weights_mib)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What each precision costs in quality.")
    parser.add_argument("--only", action="append", choices=PRECISIONS, help="This precision; may be repeated.")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8, first line a comment. [default: %(default)s]")
    parser.add_argument("--window", type=int, default=512, help="Tokens scored together. [default: %(default)s]")
    parser.add_argument("--model", help="As of pointsman serve. [default: the embedded model]")
    parser.add_argument("--json", metavar="FILE", help="Write the figures as JSON; - = stdout, and nothing else there.")
    return parser.parse_args()


def main() -> None:
    """Score the text in each precision, print a table, write JSON where asked."""
    args = _parse_args()
    text = read_text(args.text)
    names = [name for name in PRECISIONS if name == REFERENCE or not args.only or name in args.only]
    progress = Progress(len(names))
    scored = {name: _score(name, args, text, progress) for name in names}
    progress.clear()
    figures = build_figures(scored)
    num_tokens = len(scored[REFERENCE].logprobs)
    report = sys.stderr if args.json == "-" else sys.stdout
    print(f"{num_tokens:,} tokens of {args.text.name}, windows of {args.window}\n", file=report)
    print(build_table(figures).to_markdown(), file=report, flush=True)
    if args.json:
        found = {"text": args.text.name, "num_tokens": num_tokens, "window": args.window, "precisions": figures}
        with sys.stdout if args.json == "-" else open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()

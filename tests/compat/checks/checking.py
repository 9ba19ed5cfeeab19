"""What every check script shares: running its checks one by one, and looking at the server without a client.

Each client's own interpreter runs this, so it imports the standard library only.
"""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NoReturn

Check = Callable[[], None]
_CHECKS: list[Check] = []
_POLL_S = 0.05
_SAMPLE = re.compile(r"^(?P<name>[^{ ]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")


def check(function: Check) -> Check:
    """Register one check; run_checks calls them in the order of the file."""
    _CHECKS.append(function)
    return function


def run_checks() -> NoReturn:
    """Run all registered checks, print `ok NAME` or `FAILED NAME` and why for each, and exit 1 if any failed."""
    has_failed = not _CHECKS
    for function in _CHECKS:
        name = function.__name__.replace("_", " ")
        started = time.monotonic()
        try:
            function()
        except Exception:
            has_failed = True
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok {name} ({time.monotonic() - started:.1f} s)", flush=True)
    sys.exit(has_failed)


def equal(found: object, expected: object) -> None:
    """Fail, with both values, unless they are equal."""
    if found != expected:
        raise AssertionError(f"found {found!r}, expected {expected!r}")


def holds(condition: object, found: object = None) -> None:
    """Fail, with what was found, unless the condition holds."""
    if not condition:
        raise AssertionError(f"found {found!r}")


def raises(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Return the exception of the given kind that the call must raise."""
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer!r}")


def fetch(url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Return status and body of a GET, or of a POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def fetch_json(url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the decoded answer, which must be a 200."""
    status, answer = fetch(url, body)
    if status != 200:
        raise AssertionError(f"{url} answered {status}: {answer.decode()}")
    return json.loads(answer)


def model_name(url: str) -> str:
    """Return the name of the model that a server has."""
    name: str = fetch_json(f"{url}/v1/models")["data"][0]["id"]
    return name


def metric(url: str, name: str, label: str = "") -> float:
    """Return the sum of a metric's samples.

    Args:
        url: Of the server.
        name: As on the wire.
        label: Only samples whose labels hold this text, such as ``finished_reason="abort"``.

    Raises:
        AssertionError: There is no such sample.
    """
    samples = [match for line in fetch(f"{url}/metrics")[1].decode().splitlines() if (match := _SAMPLE.match(line))]
    values = [float(m["value"]) for m in samples if m["name"] == name and label in (m["labels"] or "")]
    if not values:
        raise AssertionError(f"{url}/metrics has no {name} {label}")
    return sum(values)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll until the condition holds.

    Raises:
        AssertionError: It did not within the given time; names what was waited for.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain for: {what}")
        time.sleep(_POLL_S)


def wait_until_idle(url: str) -> None:
    """Wait until a server has nothing running or waiting, and no KV block in use.

    Raises:
        AssertionError: Something stayed.
    """
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    wait_until(lambda: all(metric(url, gauge) == 0 for gauge in gauges), f"0 in {', '.join(gauges)}")


def count_aborts(url: str) -> float:
    """Return how many requests a server has counted as aborted."""
    return metric(url, "vllm:request_success_total", 'finished_reason="abort"')

"""A load that moves every figure: shared beginnings, more requests than fit, clients that leave, and mistakes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

_ANSWER_S = 120.0
_SHARED = "You are a patient assistant who answers in short sentences, one after the other, and never shouts. " * 2


class MixedLoad:
    """`with MixedLoad(url) as load: ...` keeps it up until the end of the block.

    Args:
        url: The server's.
        num_streams: At once.

    Attributes:
        failures: What should have been answered and was not.
        num_done: Streams read to their end.
    """

    def __init__(self, url: str, num_streams: int = 6) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.failures: list[str] = []
        self.num_done = 0
        tasks: list[Callable[[int], None]] = [self._stream] * num_streams + [self._leave, self._err]
        self._threads = [threading.Thread(target=self._repeat, args=(task, i)) for i, task in enumerate(tasks)]

    def __enter__(self) -> MixedLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(_ANSWER_S)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        """Wait for the load's effect."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain; failed requests: {self.failures[:3]}"
            time.sleep(0.2)

    def _repeat(self, task: Callable[[int], None], number: int) -> None:
        while not self._is_over.is_set():
            try:
                task(number)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
                return

    def _stream(self, number: int) -> None:
        body = self._body(f"{_SHARED} Question {number}: what comes next?", 120 + 10 * number, n=1 + number % 2)
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=_ANSWER_S) as response:
            text = "".join(response.iter_text())
        if response.status_code != 200 or "[DONE]" not in text:
            self.failures.append(f"{response.status_code}: {text[-200:]}")
        self.num_done += 1

    def _leave(self, number: int) -> None:
        """A client that goes after the first bytes."""
        body = self._body("Tell me a very long story about a railway.", 100)
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=_ANSWER_S) as response:
            next(response.iter_raw())
        self._is_over.wait(0.3)

    def _err(self, number: int) -> None:
        """A misspelt field, which is ignored, and a mistake, which is refused."""
        body = {**self._body("Hello", 3), "stream": False}
        httpx.post(f"{self._url}/v1/completions", json={**body, "temprature": 1}, timeout=_ANSWER_S)
        httpx.post(f"{self._url}/v1/completions", json={**body, "max_tokens": -1}, timeout=_ANSWER_S)
        self._is_over.wait(0.3)

    def _body(self, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **more}

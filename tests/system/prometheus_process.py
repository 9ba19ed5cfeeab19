"""A real Prometheus that scrapes a server every second and judges it by our rules."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from tests.e2e.server_process import free_port

START_S = 60.0


class PrometheusProcess:
    """`with PrometheusProcess(program, folder, "127.0.0.1:8000", rules) as prometheus: prometheus.ask("up")`.

    Args:
        program: Its path.
        folder: For its configuration and data.
        target: The server, host and port.
        rules: The rule file.

    Attributes:
        url: Without a path.
    """

    def __init__(self, program: str, folder: Path, target: str, rules: Path) -> None:
        shutil.copy(rules, folder / "alerts.yaml")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [{"job_name": "pointsman", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "prometheus.log"
        self._command = [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]

    def __enter__(self) -> PrometheusProcess:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._wait_until_ready()
            self.wait_until_found("up == 1", START_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    def _wait_until_ready(self) -> None:
        """Until its data are open it answers with a sentence, and 503."""
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, self._log.read_text()
            try:
                if httpx.get(f"{self.url}/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"not ready after {START_S} s:\n{self._log.read_text()[-2000:]}"
            time.sleep(0.1)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, query: str) -> list[float]:
        """Return the values of an instant query; one that is not valid is a failure."""
        reply = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=30).json()
        assert reply["status"] == "success", f"{query}: {reply.get('error')}"
        return [float(sample["value"][1]) for sample in reply["data"]["result"]]

    def ask_rules(self) -> list[dict[str, Any]]:
        """Return every rule, with its health and what it last failed on."""
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=30).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_until_found(self, query: str, seconds: float) -> list[float]:
        """Ask until something that is a number comes, and return it."""
        deadline = time.monotonic() + seconds
        while True:
            assert self._process.poll() is None, self._log.read_text()
            found = [value for value in self.ask(query) if not math.isnan(value)]
            if found:
                return found
            assert time.monotonic() < deadline, f"waited {seconds} s for {query}:\n{self._log.read_text()[-2000:]}"
            time.sleep(0.2)

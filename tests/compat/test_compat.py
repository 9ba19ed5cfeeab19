"""The parts of `make compat` that need no client: pins, when an environment is made, how a check is told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat import clients
from tests.compat.checks import checking
from tests.compat.clients import CLIENTS, Client, NodeClient

README = (clients.HERE.parents[1] / "README.md").read_text(encoding="utf-8")
PIN = re.compile(r"(?P<name>[a-z-]+)(?:\[api\])?==(?P<version>[0-9.]+)")


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_has_exact_pins_that_the_readme_names(client: Client) -> None:
    section = README.split("## Clients\n")[1].split("\n## ")[0]
    if isinstance(client, NodeClient):
        versions = re.findall(r"(\S+) ([0-9.]+)", client.versions)
        assert {"openai", "ai"} <= {name for name, _ in versions}
        shown = [version for name, version in versions if name == "openai"]
    else:
        pins = [PIN.fullmatch(line) for line in client.versions.split(", ")]
        assert all(pins), client.versions
        shown = [pin["version"] for pin in pins if pin and pin["name"] != "transformers"]
        assert Path(client.command[1]).is_file()
    for version in shown:
        assert ".".join(version.split(".")[:2]) in section


def test_other_pins_mean_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "HERE", tmp_path)
    monkeypatch.setattr(clients, "ENVIRONMENTS", tmp_path / "made")
    monkeypatch.setattr(Client, "_install", lambda self: None)
    pins = tmp_path / "requirements-some.txt"
    pins.write_text("some==1.0\n")
    client = Client("some", 1)
    assert not client.is_made()
    client.make()
    assert client.is_made()
    pins.write_text("some==1.1\n")
    assert not client.is_made()


def test_what_pip_says_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "HERE", tmp_path)
    monkeypatch.setattr(clients, "ENVIRONMENTS", tmp_path / "made")
    client = Client("some", 1)
    (tmp_path / "requirements-some.txt").write_text("no such requirement\n")
    with pytest.raises(clients.EnvironmentNotMadeError, match="no such requirement"):
        client.make()
    assert not client.is_made()


def test_a_failed_check_is_named_and_the_others_run() -> None:
    script = "\n".join(
        [
            "from checking import check, equal, run_checks",
            "@check\ndef first_one(): equal(1, 2)",
            "@check\ndef second_one(): equal(1, 1)",
            "run_checks()",
        ]
    )
    folder = clients.HERE / "checks"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAILED first one\n" in done.stdout
    assert "found 1, expected 2" in done.stdout
    assert "\nok second one (" in done.stdout


def test_a_metric_is_the_sum_of_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 'a_total{x="1"} 2.0\na_total{x="2"} 3.0\na_created{x="1"} 9.0\nb 7\n'
    monkeypatch.setattr(checking, "fetch", lambda url: (200, page.encode()))
    assert checking.metric("", "a_total") == 5
    assert checking.metric("", "a_total", 'x="2"') == 3
    assert checking.metric("", "b") == 7
    with pytest.raises(AssertionError, match="has no c"):
        checking.metric("", "c")

"""deploy/systemd/pointsman.service, judged by systemd itself; what it waits for against what the server takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from server.config import ServerConfig
from server.exit_codes import ExitCode
from server.lifecycle.watchdog import GRACE_S

pytestmark = pytest.mark.system

UNIT = Path(__file__).parents[2] / "deploy/systemd/pointsman.service"
# systemd's scale: 0 = nothing of the system within reach, 10 = all of it; from 5 on it calls a service "exposed".
MAX_EXPOSURE = 3.0


def read_setting(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that exists on this machine."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/pointsman/bin/pointsman", "/bin/true"))
    return path


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_systemd_finds_nothing_to_complain_of(unit: Path) -> None:
    assert run("systemd-analyze", "verify", "--man=no", str(unit)) == ""


def test_little_of_the_system_is_within_reach(unit: Path) -> None:
    told = run("systemd-analyze", "security", "--offline=yes", f"--threshold={MAX_EXPOSURE * 10:.0f}", str(unit))
    found = re.search(r"Overall exposure level for pointsman\.service: ([\d.]+)", told)
    assert found is not None, told
    assert float(found[1]) <= MAX_EXPOSURE


def test_systemd_waits_longer_than_the_server_takes_at_most() -> None:
    config = ServerConfig()
    assert read_setting("Type") == "notify"
    assert float(read_setting("TimeoutStopSec")) > config.drain_timeout_s + 30
    # Fed until an engine is 2 s late; our own watchdog, which tells the clients, must come first.
    assert float(read_setting("WatchdogSec")) > config.watchdog_timeout_s + GRACE_S


def test_only_what_starting_again_cannot_mend_is_left_as_it_is() -> None:
    codes = [ExitCode.USAGE, ExitCode.BAD_MODEL, ExitCode.NO_MODEL]
    assert [int(code) for code in read_setting("RestartPreventExitStatus").split()] == codes


def test_every_variable_of_the_unit_is_a_flag() -> None:
    names = re.findall(r"^Environment=POINTSMAN_(\w+)=", UNIT.read_text(), re.MULTILINE)
    assert names == ["CACHE_DIR", "API_KEYS_FILE"]
    assert {name.lower() for name in names} <= set(ServerConfig.__dataclass_fields__)

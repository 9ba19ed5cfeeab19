"""make-secrets.sh, run for real: what it writes is what the server reads, and a second run changes nothing."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

from server.access.api_keys import KeyRing
from server.access.key_file import read_key_file
from server.principal import Scope

SCRIPT = Path(__file__).parent.parent.parent / "deploy" / "make-secrets.sh"


def make_secrets(folder: Path) -> str:
    shutil.copy(SCRIPT, folder)
    return subprocess.run([folder / SCRIPT.name], capture_output=True, text=True, check=True).stdout


def test_the_server_knows_the_keys_that_were_shown_and_prometheus_own(tmp_path: Path) -> None:
    shown, shown_admin = (line.split()[-1] for line in make_secrets(tmp_path).splitlines())
    secrets = tmp_path / "secrets"
    keys = KeyRing(read_key_file(secrets / "api-keys"))
    user, admin = keys.find(shown.encode()), keys.find(shown_admin.encode())
    prometheus = keys.find((secrets / "metrics-key").read_bytes())
    assert user is not None and prometheus is not None and admin is not None
    assert (user.key_id, user.scopes) == ("user", {Scope.USER})
    assert (admin.key_id, admin.scopes) == ("admin", {Scope.ADMIN})
    assert (prometheus.key_id, prometheus.scopes) == ("prometheus", {Scope.METRICS})
    kept = (secrets / "api-keys").read_text()
    assert shown not in kept and shown_admin not in kept
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()}
    assert make_secrets(tmp_path) == ""
    assert {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()} == before
    assert before.keys() == {"api-keys", "metrics-key", "grafana-admin"}

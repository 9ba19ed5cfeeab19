#!/usr/bin/env python3
"""Runs an image as a container engine would and asks it what matters: `deploy/image/smoke.py IMAGE`. Root, buildah.

No engine is needed: the entrypoint is process 1 of a PID namespace, as the image's user without capabilities, on the
image's file system mounted read-only, with a /tmp of its own and --cache as its volume. The network is the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_KEY = "smoke-test-key-0123456789abcdef"
_KEYS = f"smoke:user+metrics:{_KEY}"
_READY_S = 600.0
_STOP_S = 45.0
_USAGE_ERROR = 64
# The engine's part: each mount, then the drop of rights. Nothing is left of it when process 1 ends.
_BOX = """set -eu
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro "$ROOT"
mount -t proc proc "$ROOT/proc"
mount --rbind /sys "$ROOT/sys"
mount --rbind /dev "$ROOT/dev"
mount -t tmpfs -o size=256m,mode=1777 tmpfs "$ROOT/tmp"
mount --bind "$CACHE" "$ROOT/cache"
[ ! -e "$ROOT/etc/resolv.conf" ] || mount --bind /etc/resolv.conf "$ROOT/etc/resolv.conf"
exec chroot "$ROOT" "$@"
"""


class SmokeError(Exception):
    """The image does not do what it should; the message says what."""


class Image:
    """An image, mounted.

    Attributes:
        root: Its file system.
        config: As Docker shows it: User, Env, Entrypoint, Cmd, Healthcheck.
    """

    def __init__(self, name: str) -> None:
        self.config: dict[str, Any] = json.loads(_buildah("inspect", "--type", "image", name))["Docker"]["config"]
        self._container = _buildah("from", "--pull-never", name)
        self.root = Path(_buildah("mount", self._container))

    def close(self) -> None:
        """Give the file system back."""
        _buildah("rm", self._container)

    def as_user(self, environment: Mapping[str, str], command: list[str]) -> list[str]:
        """Return a command line, for inside of the root, that runs another as the image would."""
        variables = dict(line.split("=", 1) for line in self.config["Env"]) | environment
        uid, gid = self.config["User"].split(":")
        return [
            *("/usr/bin/env", "-i", "-C", self.config["WorkingDir"]),
            *(f"{name}={value}" for name, value in variables.items()),
            *("/usr/bin/setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"),
            *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", *command),
        ]


class Box:
    """The entrypoint, running. Use it in a ``with``.

    Args:
        image: What runs.
        cache: Its /cache.
        environment: On top of the image's own.
    """

    def __init__(self, image: Image, cache: Path, environment: Mapping[str, str]) -> None:
        self._image = image
        self.port = _free_port()
        self._environment = {**environment, "POINTSMAN_PORT": str(self.port)}
        self._cache = cache

    def __enter__(self) -> Box:
        self._log = Path(tempfile.mkstemp(prefix="pointsman-smoke-", suffix=".log")[1])
        config = self._image.config
        inside = self._image.as_user(self._environment, [*config["Entrypoint"], *config["Cmd"]])
        with self._log.open("wb") as log:
            self._unshare = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "sh", "-c", _BOX, "box", *inside],
                env={**os.environ, "ROOT": str(self._image.root), "CACHE": str(self._cache)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *reason: object) -> None:
        self._unshare.kill()
        self._unshare.wait()
        self._log.unlink()

    def output(self) -> str:
        """Return what it has printed so far."""
        return self._log.read_text(errors="replace")

    def pid(self) -> int:
        """Return what the machine calls the box's process 1, once it is the entrypoint."""
        program = Path(self._image.config["Entrypoint"][0]).name
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")

        def find() -> int:
            pid = int((children.read_text().split() or ["0"])[0])
            return pid if pid and program in Path(f"/proc/{pid}/cmdline").read_text() else 0

        return self.wait_for(find, 30, "the entrypoint did not start")

    def wait_for(self, condition: Callable[[], int], seconds: float, complaint: str) -> int:
        """Poll until something true comes; the process ending first is an error too."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if (code := self._unshare.poll()) is not None:
                raise SmokeError(f"{complaint}: it ended with {code}\n{self.output()}")
            if time.monotonic() > deadline:
                raise SmokeError(f"{complaint} within {seconds:.0f} s\n{self.output()}")
            time.sleep(0.05)
        return found

    def wait_end(self, seconds: float) -> int:
        """Return the exit code."""
        try:
            return self._unshare.wait(seconds)
        except subprocess.TimeoutExpired:
            raise SmokeError(f"it did not end within {seconds:.0f} s\n{self.output()}") from None

    def check_health(self, *arguments: str) -> tuple[int, str]:
        """Run the image's HEALTHCHECK inside; return its exit code and what it says."""
        test = self._image.config["Healthcheck"]["Test"]
        inside = self._image.as_user(self._environment, [*test[1:], *arguments])
        enter = ["nsenter", "--target", str(self.pid()), "--mount", "--pid", "--root", "--"]
        result = subprocess.run([*enter, *inside], capture_output=True, text=True, check=False)
        return result.returncode, (result.stdout + result.stderr).strip()

    def ask(self, path: str, body: object = None, key: str = _KEY) -> tuple[int, str]:
        """Return the status and text of an answer."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        request.add_header("Authorization", f"Bearer {key}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


# ---------------------------------------------------------------------- what is checked
def check_config(image: Image) -> str:
    """The image is what its Dockerfile promises, and holds nothing of the machine that built it."""
    config = image.config
    _expect(config["User"] == "10001:0", f"the user is {config['User']}")
    _expect("/cache" in config["Volumes"], "there is no volume for models")
    _expect("8000/tcp" in config["ExposedPorts"], "port 8000 is not exposed")
    names = {line.split("=", 1)[0] for line in config["Env"]}
    foreign = {name for name in names if name.lower().endswith("_proxy") or name.startswith("PIP_INDEX")}
    _expect(not foreign, f"settings of the build are in the image: {foreign}")
    places = [image.root / name for name in ("etc/pip.conf", "run/secrets", "root/.cache", "root/.config")]
    left = [path for place in places for path in (place, *place.rglob("*")) if path.is_file()]
    _expect(not left, f"settings of the build are in the image: {left}")
    return f"runs as {config['User']}"


def check_contents(image: Image) -> str:
    """Nothing compiles, and nothing that runs could be changed by who runs it."""
    compilers = [name for name in ("c++", "g++", "gcc", "cc") if (image.root / "usr/bin" / name).exists()]
    _expect(not compilers, f"compilers are in the image: {compilers}")
    program = image.root / "opt/pointsman"
    loose = [path for path in program.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    _expect(not loose, f"others may write to {loose[:3]}")
    size = sum(path.stat().st_size for path in image.root.rglob("*") if path.is_file() and not path.is_symlink())
    return f"{size / 1e6:,.0f} MB of files, no compiler"


def check_refusal(image: Image, cache: Path) -> str:
    """Without keys it says what is missing, and what would do."""
    with Box(image, cache, {}) as box:
        code = box.wait_end(60)
        said = box.output().strip()
    _expect(code == _USAGE_ERROR, f"without keys it ended with {code}: {said}")
    _expect("api-key" in said and "insecure" in said, f"it does not say what to do: {said}")
    return said.splitlines()[-1]


def check_early_stop(image: Image, cache: Path) -> str:
    """SIGTERM ends it also before it serves: process 1 does not die of a signal that it does not handle."""
    with Box(image, cache, {"POINTSMAN_API_KEY": _KEYS}) as box:
        pid = box.pid()
        time.sleep(0.7)
        os.kill(pid, signal.SIGTERM)
        started = time.monotonic()
        code = box.wait_end(_STOP_S)
    _expect(code == 0, f"stopped while it started it ended with {code}")
    return f"stopped while it started it ended with {code} after {time.monotonic() - started:.1f} s"


def check_service(image: Image, cache: Path, is_offline: bool) -> str:
    """It becomes ready, answers those with a key, is found healthy, and ends well when it is told to."""
    environment = {"POINTSMAN_API_KEY": _KEYS} | ({"PIP_NO_INDEX": "1"} if is_offline else {})
    with Box(image, cache, environment) as box:
        started = time.monotonic()
        box.wait_for(lambda: box.check_health("/ready")[0] == 0, _READY_S, "it did not become ready")
        ready_s = time.monotonic() - started
        code, said = box.check_health()
        _expect(code == 0, f"the health check fails: {said}")
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        status, _ = box.ask("/v1/completions", body, key="wrong")
        _expect(status == 401, f"a wrong key gets {status}")
        status, text = box.ask("/v1/completions", body)
        _expect(status == 200, f"a completion gets {status}: {text}")
        answer = json.loads(text)["choices"][0]["text"]
        _expect(bool(answer.strip()), "the completion is empty")
        status, page = box.ask("/metrics")
        _expect(status == 200 and "vllm:num_requests_running" in page, f"/metrics gets {status}")
        status, page = box.ask("/status")
        _expect(status == 200 and "<script" in page, f"/status gets {status}")
        _check_kernels(box.output())
        os.kill(box.pid(), signal.SIGTERM)
        code = box.wait_end(_STOP_S)
        _expect(code == 0, f"after SIGTERM it ended with {code}\n{box.output()}")
    return f"ready after {ready_s:.1f} s, says {answer!r}, ends with 0"


def _check_kernels(output: str) -> None:
    """The compiled kernels run, from where they were installed."""
    _expect("Building the CPU kernels" not in output, f"it compiled at its start\n{output}")
    if os.uname().machine == "x86_64":
        _expect("torch computes" not in output, f"no kernels\n{output}")


# ---------------------------------------------------------------------- parts
def _expect(condition: bool, complaint: str) -> None:
    if not condition:
        raise SmokeError(complaint)


def _buildah(*arguments: str) -> str:
    environment = {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot", **os.environ}
    command = ["buildah", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main() -> int:
    """Run every check; return 0 when all hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image")
    parser.add_argument("--cache", type=Path, help="its /cache, such as one that holds the model; else a new one")
    parser.add_argument("--offline", action="store_true", help="the model must be there, in the image or the cache")
    arguments = parser.parse_args()
    cache = Path(tempfile.mkdtemp(prefix="pointsman-smoke-"))
    if arguments.cache:
        shutil.copytree(arguments.cache, cache, dirs_exist_ok=True)
    for path in (cache, *cache.rglob("*")):
        os.chown(path, 10001, 0)
    image = Image(arguments.image)
    checks: list[Callable[[], str]] = [
        lambda: check_config(image),
        lambda: check_contents(image),
        lambda: check_refusal(image, cache),
        lambda: check_early_stop(image, cache),
        lambda: check_service(image, cache, arguments.offline),
    ]
    try:
        for check in checks:
            print(f"ok: {check()}", flush=True)
    except SmokeError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        image.close()
        shutil.rmtree(cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The clients of `make compat`: what each is, and an environment of its own for each, made once and kept."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / ".compat"
_STAMP = "made-from"


class EnvironmentNotMadeError(Exception):
    """pip or npm failed; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Attributes:
        name: Of its files, its environment and the argument that picks it.
        size_mb: Of its environment, roughly; about a third of that is downloaded.
        needs_second_server: Its checks want two servers, and end the second one.
        needs_tokenizer: Its checks want the model's tokenizer as a directory.
    """

    name: str
    size_mb: int
    needs_second_server: bool = False
    needs_tokenizer: bool = False

    @property
    def folder(self) -> Path:
        """Where its environment lives."""
        return ENVIRONMENTS / self.name

    @property
    def versions(self) -> str:
        """What is pinned, for the table."""
        return ", ".join(self._pins().read_text(encoding="utf-8").split())

    @property
    def command(self) -> list[str]:
        """The check script under the environment's own interpreter, without arguments."""
        return [str(self.folder / "bin" / "python"), str(HERE / "checks" / f"check_{self.name}.py")]

    def is_made(self) -> bool:
        """Whether the environment is there and was made from these pins."""
        stamp = self.folder / _STAMP
        return stamp.is_file() and stamp.read_text(encoding="utf-8") == self._digest()

    def make(self) -> None:
        """Make the environment anew.

        Raises:
            EnvironmentNotMadeError: It cannot be.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._install()
        (self.folder / _STAMP).write_text(self._digest(), encoding="utf-8")

    def _install(self) -> None:
        # Without a pip of its own: where Debian's ensurepip is missing, venv could not install one.
        _run([sys.executable, "-m", "venv", "--without-pip", str(self.folder)])
        pip = [sys.executable, "-m", "pip", "--python", str(self.folder / "bin" / "python")]
        _run([*pip, "install", "--quiet", "--requirement", str(self._pins())])

    def _pins(self) -> Path:
        return HERE / f"requirements-{self.name}.txt"

    def _digest(self) -> str:
        return hashlib.sha256(self._pins().read_bytes() + sys.version.encode()).hexdigest()


class NodeClient(Client):
    """A client from npm: the folder of its name holds package.json, the lock and check.mjs."""

    __slots__ = ()

    @property
    def versions(self) -> str:
        lines = self._source("package.json").read_text(encoding="utf-8").split('"dependencies": {')[1].splitlines()
        return ", ".join(line.strip(' ",').replace('": "', " ") for line in lines if '": "' in line)

    @property
    def command(self) -> list[str]:
        # Node looks for packages beside the script, so the script goes to the packages.
        shutil.copy(self._source("check.mjs"), self.folder)
        return ["node", str(self.folder / "check.mjs")]

    def _install(self) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(self._source(name), self.folder)
        _run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], self.folder)

    def _pins(self) -> Path:
        return self._source("package-lock.json")

    def _source(self, name: str) -> Path:
        return HERE / self.name / name


CLIENTS = (
    Client("openai_python", 50),
    NodeClient("openai_node", 40),
    Client("langchain_openai", 110),
    Client("litellm", 360),
    Client("llm_cli", 80),
    Client("lm_eval", 910, needs_tokenizer=True),
    Client("monitors", 30),
    Client("vllm_router", 120, needs_second_server=True),
)


def _run(command: list[str], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise EnvironmentNotMadeError(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise EnvironmentNotMadeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

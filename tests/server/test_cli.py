import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core import CudaSurvey
from server.cli import build_parser, get_version, main

ROOT = Path(__file__).parents[2]


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real program; none of these commands gets as far as a model."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("POINTSMAN_")}
    return subprocess.run(
        [sys.executable, "-m", "server", *argv],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"pointsman {get_version()}\n")


def test_help_lists_every_flag_without_importing_torch() -> None:
    code = "import sys, server.cli as c\ntry: c.main(['serve', '--help'])\nfinally: assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for flag in ("--host", "--no-enable-prefix-caching", "--kv-cache-bytes", "MODEL", "POINTSMAN_MAX_NUM_SEQS"):
        assert flag in result.stdout


@pytest.mark.parametrize(
    ("argv", "code", "complaint"),
    [
        (["serve", "--port", "high"], 64, "argument --port: must be a whole number"),
        (["serve", "--prot", "1"], 64, "unrecognized arguments: --prot"),
        (
            ["serve", "--max-num-batched-tokens", "3", "--max-num-seqs", "64"],
            64,
            "max_num_batched_tokens (3) is below max_num_seqs (64)",
        ),
        (["serve", "--host", "0.0.0.0"], 64, "--insecure"),
        (["serve", "--api-keys-file", "/no/such/file"], 64, "--api-keys-file /no/such/file cannot be read"),
        (["serve", "--ssl-certfile", "/no/such/file"], 64, "/no/such/file is not there"),
        (["serve", "--api-key", "a:boss:sk-secret"], 64, "argument --api-key: must have a SCOPE"),
        (["serve", "/no/such/model", "--port", "0"], 66, "/no/such/model"),
        ([], 64, "COMMAND"),
        (["serve", "--request-read-timeout-s", "0"], 64, "above 0"),
    ],
)
def test_a_mistake_is_a_sentence_and_an_exit_code(argv: list[str], code: int, complaint: str) -> None:
    result = run(*argv)
    assert result.returncode == code, result.stderr
    assert complaint in result.stderr
    assert "sk-secret" not in result.stderr
    assert result.stderr.startswith("pointsman: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_bad_variable_is_a_sentence() -> None:
    result = run("serve", POINTSMAN_PORT="high")
    assert result.returncode == 64
    assert result.stderr == "pointsman: POINTSMAN_PORT must be a whole number, 0 to 65535, not 'high'\n"


def test_a_taken_port_is_found_before_anything_is_loaded(taken_port: int) -> None:
    result = run("serve", "--port", str(taken_port))
    assert result.returncode == 69
    assert result.stderr.startswith(f"pointsman: Port {taken_port} on 127.0.0.1 is taken")
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    assert main(["serve", str(file), "--port", "0"]) == 65
    assert "model.gguf" in capsys.readouterr().err


def test_an_interrupted_start_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.cli.resolve_model", interrupt)
    assert main(["serve", "--port", "0"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_fetch_fetches_the_embedded_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("server.cli.fetch_embedded_model", lambda cache_dir, progress: cache_dir / "m.gguf")
    assert main(["fetch", "--cache-dir", str(tmp_path)]) == 0
    assert str(tmp_path / "m.gguf") in capsys.readouterr().err


def test_abbreviated_flags_are_not_taken() -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--max-num-s", "4"])


def test_onednn_keeps_few_programs_unless_the_operator_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.cli.bind", interrupt)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "5")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "5")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    main(["serve", "--port", "0"])
    assert (os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("5", "64")


def test_a_card_that_is_not_there_is_missed_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("server.cli.survey_cuda", CudaSurvey)
    assert main(["serve", "/no/such/model", "--port", "0", "--backend", "cuda"]) == 64
    assert "backend cuda cannot be used here: torch is a build for the CPU" in capsys.readouterr().err

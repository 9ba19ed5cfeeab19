"""The doctor as a whole: exit codes, and a forecast that what serve prints confirms."""

from __future__ import annotations

import io
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from server.config import ServerConfig
from server.doctor.command import choose_exit_code, diagnose, run_doctor
from server.exit_codes import ExitCode
from server.model_resolver import ModelResolveError
from tests.e2e.server_process import ServerProcess
from tests.engine_core.model_checkpoints import save_checkpoint


def ask(config: ServerConfig, **environment: str) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    code = run_doctor(config, environment=environment, version="1", as_json=True, out=out)
    return code, json.loads(out.getvalue())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(path, "llama")
    return path


def test_a_model_that_fits(checkpoint: Path) -> None:
    code, found = ask(ServerConfig(model=str(checkpoint), port=0))
    levels = {finding["level"] for finding in found["findings"]}
    assert code == found["exit_code"] == (1 if "warning" in levels else 0), found["findings"]
    assert found["fits"] and found["model"]["architecture"] == "LlamaForCausalLM"
    assert found["memory"]["weights_bytes"] > 0 and found["memory"]["kv_tokens"] > 0


def test_a_model_that_does_not_fit(checkpoint: Path) -> None:
    code, found = ask(ServerConfig(model=str(checkpoint), port=0, kv_cache_bytes=2**50))
    assert code == ExitCode.BAD_MODEL and found["fits"] is False
    assert "lower --num-kv-blocks" in json.dumps(found["findings"]).lower() or "Lower" in json.dumps(found)


def test_each_error_has_the_exit_code_of_serve(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _ = ask(ServerConfig(model=str(checkpoint), port=taken.getsockname()[1]))
    assert code == ExitCode.PORT_TAKEN
    code, _ = ask(ServerConfig(model=str(checkpoint), port=0, cpu_isa="torch", quantization="int8"))
    assert code == ExitCode.USAGE
    with pytest.raises(ModelResolveError, match="no model /no/such"):
        ask(ServerConfig(model="/no/such", port=0))


def test_a_broken_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    code, found = ask(ServerConfig(model=str(tmp_path), port=0))
    assert code == ExitCode.BAD_MODEL and found["fits"] is None


def test_a_misspelt_variable_is_a_warning(checkpoint: Path) -> None:
    code, found = ask(ServerConfig(model=str(checkpoint), port=0), POINTSMAN_QUANTISATION="int8")
    assert code == ExitCode.SOME_FAILED
    assert "Did you mean POINTSMAN_QUANTIZATION?" in [finding["todo"] for finding in found["findings"]]


def test_the_embedded_model_that_is_not_there_yet(tmp_path: Path) -> None:
    diagnosis = diagnose(ServerConfig(port=0, cache_dir=tmp_path), environment={}, version="1")
    assert diagnosis.download_bytes == 93_000_000 and diagnosis.state is None
    assert "the first start downloads 89 MiB" in " ".join(finding.says for finding in diagnosis.findings)
    assert choose_exit_code(diagnosis) in (ExitCode.OK, ExitCode.SOME_FAILED)


def printed_memory(output: str) -> tuple[int, int, int]:
    """Weights and KV cache in MiB, and KV tokens, as serve printed them."""
    weights, kv, tokens = re.search(
        r"weights +([\d,]+) MiB\s+KV cache +([\d,]+) MiB.*\s+holds +([\d,]+) tokens", output
    ).groups()  # type: ignore[union-attr]
    return tuple(int(number.replace(",", "")) for number in (weights, kv, tokens))  # type: ignore[return-value]


@pytest.mark.parametrize("flags", [{}, {"quantization": "int4", "kv_cache_dtype": "int8"}], ids=["auto", "int4"])
def test_serve_prints_what_the_doctor_said(embedded_model: Path, flags: dict[str, str]) -> None:
    # So many full-length requests fit anywhere; the free memory of a busy machine changes from second to second.
    _, found = ask(ServerConfig(port=0, max_num_seqs=2, **flags))  # type: ignore[arg-type]
    arguments = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", value)]
    with ServerProcess("--max-num-seqs", "2", *arguments) as server:
        server.wait_until(lambda: "curl " in server.output, 10)
        said = server.output
    memory = found["memory"]
    expected = (memory["weights_bytes"] / 2**20, memory["kv_bytes"] / 2**20, memory["kv_tokens"])
    for printed, foretold in zip(printed_memory(said), expected, strict=True):
        assert printed == pytest.approx(foretold, rel=0.05)

"""The doctor as a whole: what it says of real files, and its exit codes."""

from __future__ import annotations

import io
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from server.config import ServerConfig
from server.doctor.command import choose_exit_code, diagnose, run_doctor
from server.exit_codes import ExitCode
from server.model_resolver import ModelResolveError
from tests.engine_core.model_checkpoints import save_checkpoint
from tests.server.small_tokenizers import train_byte_level


def ask(config: ServerConfig, **environment: str) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    code = run_doctor(config, environment=environment, version="1", as_json=True, out=out)
    return code, json.loads(out.getvalue())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(path, "llama")
    train_byte_level().save(str(path / "tokenizer.json"))
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
    assert found["findings"][0]["todo"] == "Lower --num-kv-blocks or --kv-cache-bytes."


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


def test_a_model_without_a_tokenizer_or_with_a_template_that_is_none(checkpoint: Path, tmp_path: Path) -> None:
    _, found = ask(ServerConfig(model=str(checkpoint), port=0))
    assert "the model has no chat template" in json.dumps(found["findings"])
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% broken"}))
    code, found = ask(ServerConfig(model=str(copy), port=0))
    assert code == ExitCode.SOME_FAILED and "chat is refused" in json.dumps(found["findings"])
    (copy / "tokenizer.json").unlink()
    code, found = ask(ServerConfig(model=str(copy), port=0))
    assert code == ExitCode.BAD_MODEL and found["fits"], "it fits, but it cannot be served"


def test_a_misspelt_variable_is_a_warning(checkpoint: Path) -> None:
    code, found = ask(ServerConfig(model=str(checkpoint), port=0), POINTSMAN_QUANTISATION="int8")
    assert code == ExitCode.SOME_FAILED
    assert "Did you mean POINTSMAN_QUANTIZATION?" in [finding["todo"] for finding in found["findings"]]


def test_the_embedded_model_that_is_not_there_yet(tmp_path: Path) -> None:
    diagnosis = diagnose(ServerConfig(port=0, cache_dir=tmp_path), environment={}, version="1")
    assert diagnosis.download_bytes == 93_000_000 and diagnosis.state is None
    assert "the first start downloads 89 MiB" in " ".join(finding.says for finding in diagnosis.findings)
    assert choose_exit_code(diagnosis) in (ExitCode.OK, ExitCode.SOME_FAILED)

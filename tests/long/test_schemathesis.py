"""The OpenAPI document against a real server: whatever the schemas allow, and much that they do not, is answered as
documented and never by a 5xx. Run by `make test-long`, which installs schemathesis beside the server's environment."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.config import default_cache_dir
from server.model_resolver import fetch_embedded_model
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-long" / "bin"
# One bad answer of these, and the run fails.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# A chat without max_tokens runs to the end of the context: that must be near.
CONTEXT_TOKENS = "48"
MAX_TIME_S = 180


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    model = fetch_embedded_model(default_cache_dir(), progress=print)
    with ServerProcess(str(model), "--max-model-len", CONTEXT_TOKENS, "--num-kv-blocks", "64") as process:
        yield process


def run_tool(name: str, *arguments: str, folder: Path) -> None:
    tool = TOOLS / name
    assert tool.exists(), f"{tool} is missing: run this through `make test-long`"
    result = subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]


def test_the_document_is_valid_openapi(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "openapi.json"
    file.write_bytes(httpx.get(server.url + "/openapi.json").content)
    run_tool("openapi-spec-validator", "--schema", "3.1", str(file), folder=tmp_path)


def test_every_answer_is_as_documented_and_none_is_a_server_error(server: ServerProcess, tmp_path: Path) -> None:
    run_tool(
        *("schemathesis", "run", server.url + "/openapi.json", "--checks", CHECKS),
        *("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "50", "--seed", "1"),
        *("--max-time", str(MAX_TIME_S), "--request-timeout", "120", "--output-sanitize", "false"),
        folder=tmp_path,
    )
    # And afterwards nothing is left of it.
    assert httpx.get(server.url + "/load").json() == {"server_load": 0}
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 2}, timeout=120)
    assert answer.status_code == 200

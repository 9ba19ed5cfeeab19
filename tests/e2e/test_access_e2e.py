"""Keys as their users meet them: the real process, the real model, the OpenAI SDK, and a file that changes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from server.access.api_keys import format_digest_line
from server.principal import Scope
from tests.e2e.raw_http import send
from tests.e2e.server_process import ServerProcess

MODEL = "SmolLM2-135M-Instruct"
ALICE, BOB, PROM, ROOT, LATE = (f"sk-{name}-0123456789abcdef" for name in ("alice", "bob", "prom", "root", "late"))
PROMPT = "One prompt, long enough for several blocks of the cache. " * 16


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(
        f"# who may come in\n{format_digest_line('bob', [Scope.USER], BOB)}\nprom:metrics:{PROM}\nroot:admin:{ROOT}\n"
    )
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(embedded_model: Path, key_file: Path) -> Iterator[ServerProcess]:
    environment = {"POINTSMAN_API_KEY": f"alice:user:{ALICE}"}
    argv = ("--num-kv-blocks", "128", "--api-keys-file", str(key_file), "--log-level", "debug")
    with ServerProcess(*argv, env=environment) as process:
        yield process


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def connect(server: ServerProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def count_cached(server: ServerProcess, key: str, **fields: str) -> int:
    """Send the prompt, and return how many of its tokens were not computed."""
    with connect(server, key) as client:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0, extra_body=fields)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_the_sdk_raises_what_it_raises_for_openai(server: ServerProcess) -> None:
    with connect(server, "sk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key" and caught.value.request_id
    with connect(server, PROM) as client, pytest.raises(openai.PermissionDeniedError) as denied:
        client.completions.create(model=MODEL, prompt="a")
    assert denied.value.code == "insufficient_scope"
    with connect(server, ALICE) as client:
        assert [model.id for model in client.models.list()] == [MODEL]


def test_f9_one_key_does_not_find_what_another_has_cached(server: ServerProcess) -> None:
    assert count_cached(server, ALICE) == 0
    of_her_own = count_cached(server, ALICE)
    assert of_her_own > 100
    assert count_cached(server, BOB) == 0
    assert count_cached(server, BOB) == of_her_own
    assert count_cached(server, BOB, cache_salt="mine") == 0
    assert count_cached(server, BOB, cache_salt="mine") == of_her_own
    assert count_cached(server, ALICE, cache_salt="mine") == 0


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: x/health?\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x/health#\r\n\r\n",
        b"GET /v1/models?/health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models#/health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models;/health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://x/health/../v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://x/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health/../v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health%2f..%2fv1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET //v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics%0a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Original-URL: /health\r\nX-Rewrite-URL: /health\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\n\r\n",
        b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: null\r\nAccess-Control-Request-Method: GET\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_cve_2026_48746_cve_2026_48710_no_spelling_of_a_request_comes_around_the_keys(
    server: ServerProcess, request_head: bytes
) -> None:
    """A path was put together with the Host header, so that one with a slash in it named an open path."""
    reply = send(server.port, request_head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert reply.status in (400, 401)
    assert MODEL.encode() not in reply.body and b"vllm:" not in reply.body


def test_a_key_that_is_added_opens_and_one_that_is_taken_out_does_not(server: ServerProcess, key_file: Path) -> None:
    def status(key: str) -> int:
        return httpx.get(server.url + "/v1/models", headers=bearer(key)).status_code

    assert (status(BOB), status(LATE)) == (200, 401)
    key_file.write_text(f"late:user:{LATE}\nroot:admin:{ROOT}\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait_until(lambda: status(LATE) == 200, 10)
    assert (status(BOB), status(ALICE)) == (401, 200)
    key_file.write_text("late:boss:x\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait_until(lambda: "stays in use" in server.output, 10)
    assert status(LATE) == 200


def test_refusals_are_on_the_metrics_page_and_no_key_is_anywhere(server: ServerProcess) -> None:
    page = httpx.get(server.url + "/metrics", headers=bearer(ROOT)).text
    series = [line for line in page.splitlines() if line.startswith("pointsman:access_refusals_total{")]
    assert len(series) == 5
    assert sum(float(line.rsplit(" ", 1)[1]) for line in series) > 10
    assert "requests refused: " in server.output
    for text in (page, server.output):
        assert not any(key in text for key in (ALICE, BOB, PROM, ROOT, LATE, "sk-wrong"))
    assert "$POINTSMAN_API_KEY" in server.output, "the curl line takes its key from the shell"

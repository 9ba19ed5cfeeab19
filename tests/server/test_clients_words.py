"""No path, address or name that a client sends reaches the disk or the network: the interpreter itself is asked."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.chat_template import ChatTemplate
from server.protocol import CHAT_FIELDS, COMPLETION_FIELDS
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import build_app, connect

# So unusual that an event of the interpreter which holds it has it from the client.
MARK = "zqxj7marker"
FILE, URL = f"/etc/{MARK}/secret.gguf", f"http://169.254.169.254/{MARK}"
_WATCHED = ("open", "os.", "shutil.", "glob.", "socket.", "subprocess.", "urllib.", "ctypes.dlopen", "import", "exec")
_events: list[str] | None = None


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _events is not None and event.startswith(_WATCHED):
        _events.append(f"{event}: {args!r}")


sys.addaudithook(_hear)  # for good: there is no way to take one away


@contextmanager
def watched_events() -> Iterator[list[str]]:
    """Collect what the interpreter does with disk, network and code."""
    global _events
    _events = collected = []
    try:
        yield collected
    finally:
        _events = None


def test_the_watch_sees_files_hosts_and_imports() -> None:
    with watched_events() as events:
        for act in (
            Path(f"/nowhere/{MARK}").read_text,
            lambda: socket.getaddrinfo(MARK, 80, flags=socket.AI_NUMERICHOST),
            lambda: __import__(MARK),
        ):
            with pytest.raises((OSError, ImportError)):
                act()
    kinds = {event.split(":")[0] for event in events if MARK in event}
    assert kinds >= {"open", "socket.getaddrinfo", "import"}


TEXT = f"![image]({URL}) <img src='{URL}'> file://{FILE} {{{{ include('{FILE}') }}}} {{% include '{FILE}' %}}"
PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": {"url": f"file://{FILE}"}},
    {"type": "image_url", "image_url": {"url": f"http:\\\\127.0.0.1\\{MARK}"}},
    {"type": "image_url", "image_url": {"url": f"data:image/jp2;base64,{MARK}"}},
    {"type": "video_url", "video_url": {"url": URL}},
    {"type": "audio_url", "audio_url": {"url": URL}},
    {"type": "input_audio", "input_audio": {"data": MARK, "format": "opus"}},
    {"type": "image_embeds", "image_embeds": MARK},
    {"type": "file", "file": {"file_data": FILE, "filename": FILE}},
]
FIELDS: dict[str, Any] = {
    "model": FILE,
    "lora_path": FILE,
    "chat_template": f"{{% include '{FILE}' %}}",
    "chat_template_kwargs": {"path": FILE},
    "documents": [{"url": URL}],
    "tools": [{"type": "function", "function": {"name": MARK, "parameters": {"$ref": URL}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": f"file://{FILE}"}}},
    "structured_outputs": {"grammar": FILE},
    "guided_grammar": FILE,
    "grammar": FILE,
    "guided_json": URL,
    "prompt_embeds": MARK,
    "logits_processors": [{"qualname": f"os.system.{MARK}"}],
    "kv_transfer_params": {"remote_host": URL, "remote_engine_id": FILE},
    "mm_processor_kwargs": {"path": FILE},
    "vllm_xargs": {"path": FILE},
    "audio": {"voice": FILE},
    "web_search_options": {"url": URL},
    "metadata": {"path": FILE},
    "user": FILE,
    "cache_salt": FILE,
    "request_id": FILE,
    "stop": [FILE],
    "a_field_that_nobody_knows": URL,
}
# Taken without effect, or as a text and nothing more.
TAKEN = {"metadata", "user", "cache_salt", "request_id", "stop", "a_field_that_nobody_knows"}


class IncludingTemplate:
    """A template of the real kind, over messages that look like one."""

    def __init__(self) -> None:
        self._template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")

    def render(self, messages: Any, add_generation_prompt: bool = True) -> str:
        return self._template.render(messages, add_generation_prompt)


async def post(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, list[str]]:
    """Send a body; return the status and what the interpreter did with the marked words."""
    async with connect(build_app(FakeEngineClient(), template=IncludingTemplate())) as client:
        await client.post(path, json={}, headers=headers)  # whatever is imported late is imported now
        with watched_events() as events:
            response = await client.post(path, json=body, headers=headers)
    assert b"Traceback" not in response.content
    return response.status_code, [event for event in events if MARK in event]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_no_field_touches_disk_or_network(path: str, field: str) -> None:
    body: dict[str, Any] = {"prompt": "hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "hi"}]}
    status, events = await post(path, {**body, field: FIELDS[field]})
    assert events == []
    if field in TAKEN:
        assert status == 200
    elif field in (CHAT_FIELDS if "chat" in path else COMPLETION_FIELDS):  # what an endpoint does not know it ignores
        assert status in (400, 404)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part["type"])
async def test_cve_2025_6242_cve_2026_24779_no_media_is_fetched(part: dict[str, Any]) -> None:
    """Nor decoded (CVE-2026-22778, CVE-2026-5497), nor loaded as a tensor (CVE-2025-62164)."""
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}
    status, events = await post("/v1/chat/completions", body)
    assert (status, events) == (400, [])


async def test_cve_2026_0599_nothing_in_a_text_is_fetched_or_rendered() -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/completions", {"prompt": TEXT}),
        ("/tokenize", {"prompt": TEXT}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": TEXT}]}),
    ):
        status, events = await post(path, body)
        assert events == [] and status in (200, 400)


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/models/{FILE}",
        f"/v1/models/..%2f..{FILE}",
        f"/docs/..%2f..{FILE}",
        f"/status/..%2f..{FILE}",
        f"/static/{FILE}",
    ],
)
async def test_cve_2023_29159_no_path_of_an_address_is_a_path_of_the_disk(path: str) -> None:
    """And CVE-2024-37032, where a digest was one; CVE-2024-39722, where the answer told whether a file is there."""
    async with connect(build_app(FakeEngineClient())) as client:
        with watched_events() as events:
            response = await client.get(path)
    assert response.status_code == 404
    assert [event for event in events if MARK in event] == []


async def test_headers_are_no_addresses_either() -> None:
    headers = {
        "X-Forwarded-Host": f"{MARK}.example",
        "Referer": URL,
        "X-Original-Url": FILE,
        "Forwarded": f"for={MARK}",
    }
    status, events = await post("/v1/completions", {"prompt": "hi"}, headers)
    assert (status, events) == (200, [])

"""From flags to the middleware: which terms hold, and what they say to browsers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_core import ConfigError
from server.access.api_keys import KeyRing, parse_api_keys
from server.access.browser_guard import HostRules
from server.access.setup import Access, open_access
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import build_app, connect
from tests.server.test_config import configure

LONG = "sk-0123456789abcdefghij"


def test_without_flags_everybody_on_this_machine_comes_in_by_its_names() -> None:
    access = open_access(configure())
    assert access.keys is None and access.tls is None and access.allowed_origins == ()
    assert access.hosts is not None
    assert access.hosts.allow("localhost:8000") and not access.hosts.allow("evil.example")


@pytest.mark.parametrize(
    ("argv", "is_checked"),
    [
        ([], True),
        (["--host", "::1"], True),
        (["--host", "0.0.0.0", "--insecure"], False),
        (["--host", "0.0.0.0", "--insecure", "--allowed-hosts", "llm.example.org"], True),
        (["--api-key", LONG], False),  # who has no key does no harm by any name
    ],
)
def test_hosts_are_checked_where_nothing_else_is(argv: list[str], is_checked: bool) -> None:
    assert (open_access(configure(*argv)).hosts is not None) == is_checked


def test_keys_come_from_flags_the_variable_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"filed:metrics:{LONG}3")
    path.chmod(0o600)
    access = open_access(
        configure("--api-key", f"a:user:{LONG}1", "--api-key", f"{LONG}2", "--api-keys-file", str(path))
    )
    assert access.keys is not None
    found = [access.keys.find(f"{LONG}{number}".encode()) for number in (1, 2, 3)]
    assert [principal and principal.key_id for principal in found] == ["a", "key2", "filed"]
    from_variable = open_access(configure(POINTSMAN_API_KEY=f"a:user:{LONG}1,b:admin:{LONG}2"))
    assert from_variable.keys is not None and len(from_variable.keys) == 2


def test_a_changed_file_changes_who_comes_in_and_the_flags_keys_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old-key-of-a-user")
    path.chmod(0o600)
    access = open_access(configure("--api-key", f"a:user:{LONG}", "--api-keys-file", str(path)))
    path.write_text("new-key")
    asyncio.run(access.watch.reload_changed())
    assert access.keys is not None
    assert access.keys.find(b"old-key-of-a-user") is None and access.keys.find(b"new-key") is not None
    path.write_text("")
    asyncio.run(access.watch.reload_changed())
    assert access.keys.find(b"new-key") is not None, "a file without keys is a mistake, not a wish"
    path.write_text(LONG)
    asyncio.run(access.watch.reload_changed())
    assert access.keys.find(b"new-key") is not None, "that key stands among the flags"
    assert access.keys.find(LONG.encode()) is not None


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--api-keys-file", "/no/such/file"], "cannot be read"),
        (["--api-key", LONG, "--api-key", LONG], "twice"),
        (["--ssl-certfile", "/no/such/file"], "/no/such/file is not there"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(argv: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        open_access(configure(*argv))
    assert LONG not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "warning"),
    [
        (["--api-key", "a:user:short"], "the API key a has fewer than 16 characters"),
        (["--api-key", LONG, "--host", "0.0.0.0"], "plain text"),
        (["--api-key", LONG], None),
    ],
)
def test_what_is_unwise_is_warned_of(argv: list[str], warning: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_access(configure(*argv))
    assert (warning in caplog.text) if warning else caplog.text == ""
    assert LONG not in caplog.text and "short" not in caplog.text.replace("shorter", "")


# ---------------------------------------------------------------------- browsers
ORIGIN = "https://chat.example.org"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def ask(access: Access, method: str, headers: dict[str, str], **parts: Any) -> httpx.Response:
    async with connect(build_app(FakeEngineClient(), access=access)) as client:
        return await client.request(method, "/v1/completions", headers=headers, **parts)


async def test_no_page_of_another_origin_reads_anything_unless_it_is_allowed() -> None:
    for access in (Access(), Access(allowed_origins=("https://other.example",))):
        answer = await ask(access, "POST", {"Origin": ORIGIN}, json={"prompt": "a"})
        preflight = await ask(access, "OPTIONS", PREFLIGHT)
        assert preflight.status_code >= 400
        for response in (answer, preflight):
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_page_of_an_allowed_origin_asks_sends_its_key_and_reads(has_keys: bool) -> None:
    keys = KeyRing(parse_api_keys("the-key")) if has_keys else None
    access = Access(keys=keys, allowed_origins=(ORIGIN,), hosts=None if has_keys else HostRules())
    preflight = await ask(access, "OPTIONS", PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert preflight.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    headers = {"Origin": ORIGIN, "Authorization": "Bearer the-key"}
    answer = await ask(access, "POST", headers, json={"prompt": "a"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


async def test_a_page_may_read_why_it_was_refused() -> None:
    access = Access(keys=KeyRing(parse_api_keys("the-key")), allowed_origins=(ORIGIN,))
    answer = await ask(access, "POST", {"Origin": ORIGIN}, json={"prompt": "a"})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == ORIGIN

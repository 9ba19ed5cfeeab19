"""What a stranger's web page may not do to a server without keys, and what others must still be able to."""

from __future__ import annotations

import httpx
import pytest

from server.access.browser_guard import HostRules
from server.access.setup import Access
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import FakeMetrics, build_app, connect

BODY = {"prompt": "hi"}


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LOCALHOST", "localhost.", "[::1]:8000", "10.0.0.7:80"),
        # A container's name, Docker's name for the machine, a development name, this server's own.
        *("pointsman:8000", "host.docker.internal:8000", "app.localhost", "given.example.org", "more.example.org:1"),
    ],
)
def test_no_stranger_owns_these_names(host: str) -> None:
    assert HostRules(["given.example.org", "More.Example.org"]).allow(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example."),
        *("notlocalhost.com", "x.internal.evil.example", "given.example.org.evil.example", "1.2.3.4.nip.io"),
        *("", "user@localhost", "localhost:8000:1", "local host", "evil.example/localhost", "localhost\n", "é"),
    ],
)
def test_these_may_be_a_strangers(host: str) -> None:
    assert not HostRules(["given.example.org"]).allow(host)


def test_a_star_allows_all() -> None:
    assert HostRules(["*"]).allow("evil.example")


async def ask(access: Access, method: str, path: str, headers: dict[str, str]) -> tuple[httpx.Response, FakeMetrics]:
    metrics = FakeMetrics()
    async with connect(build_app(FakeEngineClient(), metrics=metrics, access=access)) as client:
        return await client.request(method, path, headers=headers, json=BODY), metrics


async def test_cve_2024_28224_a_page_whose_domain_was_pointed_here_is_refused() -> None:
    """DNS rebinding: to the browser the page and this server are one site, so nothing else would stop it."""
    response, metrics = await ask(Access(hosts=HostRules()), "POST", "/v1/completions", {"Host": "evil.example:8000"})
    assert response.status_code == 421
    error = response.json()["error"]
    assert error["code"] == "host_not_allowed" and "--allowed-hosts" in error["message"]
    assert "evil.example" not in response.text
    assert metrics.refused == ["host"] and metrics.http == [("POST", "4xx", "other")]
    assert response.headers["x-request-id"]


async def test_probes_answer_by_any_name() -> None:
    response, _ = await ask(Access(hosts=HostRules()), "GET", "/health", {"Host": "balancer.example"})
    assert response.status_code == 200


async def test_where_no_host_is_asked_for_any_is_taken() -> None:
    response, _ = await ask(Access(), "GET", "/v1/models", {"Host": "evil.example"})
    assert response.status_code == 200


CROSS = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}


@pytest.mark.parametrize("path", ["/v1/completions", "/reset_prefix_cache", "/no/such/path"])
async def test_another_sites_page_sends_nothing_here(path: str) -> None:
    response, metrics = await ask(Access(), "POST", path, CROSS)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert metrics.refused == ["origin"]


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", CROSS),  # a link, a picture: it cannot be read, and changes nothing
        ("POST", {}),  # no browser
        ("POST", {"Origin": "https://chat.example.org"}),  # through a proxy on the page's own site, or an older browser
        ("POST", {"Sec-Fetch-Site": "same-origin", "Origin": "https://chat.example.org"}),
        ("POST", {"Sec-Fetch-Site": "none", "Origin": "chrome-extension://abc"}),
        ("POST", {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"}),
    ],
)
async def test_whoever_is_no_strangers_page_is_let_in(method: str, headers: dict[str, str]) -> None:
    path = "/v1/completions" if method == "POST" else "/v1/models"
    response, metrics = await ask(Access(), method, path, headers)
    assert response.status_code == 200 and metrics.refused == []


@pytest.mark.parametrize("allowed", ["https://evil.example", "*"])
async def test_an_allowed_origin_may_send(allowed: str) -> None:
    response, _ = await ask(Access(allowed_origins=(allowed,)), "POST", "/v1/completions", CROSS)
    assert response.status_code == 200

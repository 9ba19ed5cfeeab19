"""The status page in a real browser: under a real load, light and dark, wide and narrow; and when things go wrong."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_core import RequestSnapshot
from tests.e2e.server_process import ServerProcess
from tests.server.metric_samples import create_record
from tests.server.status_samples import create_row, create_snapshot
from tests.system.headless_browser import Browser
from tests.system.status_server import StatusServer

# Where screenshots are kept for people to look at; else they go with the test's other files.
KEPT = os.environ.get("SCREENSHOT_DIR")
NUM_CLIENTS = 12
STORY = "The old lighthouse keeper counted the ships that passed below his window every evening, and "

# Of a canvas: how many colours it shows, not counting what is transparent.
COUNT_COLOURS = """(id) => {
  const canvas = document.querySelector(id);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] === 255) seen.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
  }
  return seen.size;
}"""
PLACES = """() => [...document.querySelectorAll("section, .panel canvas")].map((part) => {
  const box = part.getBoundingClientRect();
  return [box.left, box.top, box.width, box.height].map(Math.round).join(" ");
}).join("; ")"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def shoot(browser: Browser, tmp_path: Path) -> Callable[[str], None]:
    def save(name: str) -> None:
        path = browser.shoot(tmp_path / f"status-{name}.png")
        assert path.stat().st_size > 5000
        if KEPT:
            shutil.copy(path, KEPT)

    return save


@pytest.fixture(autouse=True)
def _nobody_complains(browser: Browser) -> Iterator[None]:
    browser.complaints.clear()
    yield
    complaints = [text for text in browser.complaints if "net::ERR" not in text and "status of 40" not in text]
    assert complaints == [], "no script fails, and nothing breaks the content policy"


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.ask(
        f"[...document.querySelectorAll({selector!r})].map((node) => node.textContent.trim())"
    )
    return found


def wait_live(browser: Browser) -> None:
    browser.wait_until('document.querySelector("#connection").dataset.state === "live"')


# ---------------------------------------------------------------------- a real load
@pytest.fixture(scope="module")
def loaded_server() -> Iterator[ServerProcess]:
    """A real server with more requests than it may run, some with a common beginning."""
    with ServerProcess("--max-num-seqs", "6", "--max-num-batched-tokens", "128") as server:
        stopping = threading.Event()
        threads = [threading.Thread(target=_ask, args=(server.url, number, stopping)) for number in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: server.metric("vllm:request_success_total") >= 2)
        yield server
        stopping.set()
        for thread in threads:
            thread.join(120)


def _ask(url: str, number: int, stopping: threading.Event, headers: dict[str, str] | None = None) -> None:
    prompt = STORY * (3 + 7 * (number % 4)) + f"number {number}:"
    body = {"prompt": prompt, "max_tokens": 40 + 5 * number, "ignore_eos": True, "temperature": 0}
    with httpx.Client(timeout=300, headers=headers) as client:
        while not stopping.is_set():
            client.post(url + "/v1/completions", json=body)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1360, 820, 390])
def test_under_load_it_shows_what_happens(
    browser: Browser, loaded_server: ServerProcess, shoot: Callable[[str], None], width: int, dark: bool
) -> None:
    browser.look(width=width, dark=dark)
    browser.open(loaded_server.url + "/status")
    wait_live(browser)
    browser.wait_until("document.querySelectorAll('#running-rows tr').length >= 5")
    browser.wait_until("document.querySelectorAll('#waiting-rows tr').length >= 1")
    places = browser.ask(f"({PLACES})()")
    uptime = texts(browser, "#uptime")
    browser.wait_until(f"document.querySelector('#uptime').textContent !== {uptime[0]!r}")
    assert browser.ask(f"({PLACES})()") == places, "nothing moves when the next second comes"
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), "nothing stands out at the side"
    for canvas, num_colours in {"#blocks": 4, "#steps-tokens": 2, "#steps-time": 2}.items():
        assert browser.ask(f"({COUNT_COLOURS})({canvas!r})") >= num_colours, f"{canvas} is drawn"
    (first, *_) = texts(browser, "#waiting-rows td.why")
    assert first.startswith(("max_num_seqs: 6 of 6 are running", "token budget", "KV blocks", "next in line"))
    assert {*texts(browser, "#running-rows td.why")} & {"writing", "computing its prompt"}
    shoot(f"{width}-{'dark' if dark else 'light'}")


def test_the_document_adds_up(loaded_server: ServerProcess) -> None:
    document: dict[str, Any] = httpx.get(loaded_server.url + "/status.json").json()
    blocks, engine = document["blocks"], document["engine"]
    assert blocks["used"] + blocks["cached"] + blocks["free"] == blocks["total"]
    assert sum(count for _, count in blocks["cells"]) == -(-blocks["total"] // blocks["per_cell"])
    assert len(engine["running"]) == engine["num_running"] <= engine["max_num_seqs"] == 6
    assert document["steps"] and all(ms > 0 for _, _, ms in document["steps"])


def test_who_runs_keeps_its_place_when_looked_at_by_keyboard(browser: Browser, loaded_server: ServerProcess) -> None:
    browser.look()
    browser.open(loaded_server.url + "/status")
    wait_live(browser)
    browser.wait_until("document.querySelectorAll('#running-rows tr').length >= 5")
    browser.ask("document.querySelector('.scroll').focus()")
    browser.press("Tab")
    picked = browser.ask("document.activeElement.textContent")
    browser.press("Enter")
    assert browser.ask("document.activeElement.getAttribute('aria-pressed')") == "true"
    assert texts(browser, "tr.pinned .request") == [picked]


# ---------------------------------------------------------------------- what no load brings about
def create_crowd(num_waiting: int = 100) -> tuple[RequestSnapshot, ...]:
    waits = "max_num_seqs: 64 of 64 are running"
    return tuple(
        create_row(
            f"chatcmpl-{number:032x}-0",
            status="waiting",
            num_computed_tokens=0,
            num_output_tokens=0,
            num_blocks=0,
            wait_reason=waits if not number else f"behind request chatcmpl-{0:032x}-0",
        )
        for number in range(num_waiting)
    )


def test_of_a_thousand_that_wait_the_first_are_shown_and_all_are_counted(
    browser: Browser, shoot: Callable[[str], None]
) -> None:
    running = tuple(create_row(f"cmpl-{number}") for number in range(8))
    snapshot = create_snapshot(*running, waiting=create_crowd())
    object.__setattr__(snapshot, "num_waiting", 1000)
    with StatusServer(snapshot) as server:
        server.client.records["cmpl-0"] = create_record(request_id="cmpl-0", key_id="k" * 200)
        browser.look()
        browser.open(server.url)
        wait_live(browser)
        assert len(texts(browser, "#waiting-rows tr")) == 100
        assert texts(browser, "#waiting-note") == ["the first 100 of 1,000"]
        assert texts(browser, "#running-rows .key")[0] == "k" * 200
        assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), "long names are cut"
        shoot("crowd")


def test_text_of_clients_stays_text(browser: Browser) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    with StatusServer(create_snapshot(create_row("r", wait_reason=evil))) as server:
        server.sources.errors.emit(logging.LogRecord("x", logging.ERROR, "f", 1, evil, (), None))
        server.client.records["r"] = create_record(request_id="r", key_id=evil)
        browser.open(server.url)
        wait_live(browser)
        assert texts(browser, "#error-rows .text") == [evil]
        assert texts(browser, "#running-rows td.why") == [evil] == texts(browser, "#running-rows td.key")
        assert browser.ask("document.querySelectorAll('main img, main script').length") == 0
        assert browser.ask("document.title") == "org/fake-model · Pointsman"


def test_a_lost_server_is_seen_and_the_next_one_is_found(browser: Browser, shoot: Callable[[str], None]) -> None:
    with StatusServer(create_snapshot(create_row("before"))) as server:
        browser.look()
        browser.open(server.url)
        wait_live(browser)
    browser.wait_until('document.querySelector("#connection").dataset.state === "lost"')
    assert texts(browser, "#connection")[0].startswith("connection lost · again in ")
    assert browser.ask("getComputedStyle(document.querySelector('main')).opacity") == "0.5"
    shoot("lost")
    with StatusServer(create_snapshot(create_row("after")), port=server.port):
        wait_live(browser)
        assert texts(browser, "#running-rows .request") == ["after"]
        assert browser.ask("getComputedStyle(document.querySelector('main')).opacity") == "1"


def test_a_key_is_asked_for_and_kept_in_the_tab_only(browser: Browser, shoot: Callable[[str], None]) -> None:
    with StatusServer(create_snapshot(create_row("r")), key="sesame") as server:
        browser.look()
        browser.open(server.url)
        browser.wait_until('document.activeElement.id === "key"')
        assert not browser.ask("document.querySelector('#board').checkVisibility()")
        shoot("key")
        browser.type("open")
        browser.press("Enter")
        browser.wait_until("document.querySelector('#key-error').textContent === 'This API key is not known here.'")
        browser.type("sesame")
        browser.press("Enter")
        wait_live(browser)
        assert texts(browser, "#running-rows .request") == ["r"]
        assert browser.ask("sessionStorage.getItem('pointsman-key')") == "sesame"
        assert browser.ask("localStorage.length") == 0 and browser.ask("document.cookie") == ""
        browser.open(server.url)
        wait_live(browser)
        browser.ask("sessionStorage.clear()")


def test_a_real_server_with_keys_shows_its_page_to_all_and_its_requests_to_admins(browser: Browser) -> None:
    user, admin = "u" * 32, "a" * 32
    keys = {"POINTSMAN_API_KEY": f"team-a:user:{user},ops:admin:{admin}"}
    with ServerProcess("--num-kv-blocks", "256", env=keys) as server:
        stopping = threading.Event()
        thread = threading.Thread(target=_ask, args=(server.url, 8, stopping, {"Authorization": f"Bearer {user}"}))
        thread.start()
        try:
            for path in ("/status.json", "/status/events"):
                assert httpx.get(server.url + path).status_code == 401
                assert httpx.get(server.url + path, headers={"Authorization": f"Bearer {user}"}).status_code == 403
            browser.look()
            browser.open(server.url + "/status")
            browser.wait_until('document.activeElement.id === "key"')
            browser.type(user)
            browser.press("Enter")
            browser.wait_until("document.querySelector('#key-error').textContent.includes('needs admin')")
            browser.type(admin)
            browser.press("Enter")
            wait_live(browser)
            browser.wait_until("document.querySelector('#running-rows td.key')?.textContent === 'team-a'")
        finally:
            browser.ask("sessionStorage.clear()")
            stopping.set()
            thread.join(120)


def test_a_viewer_does_not_keep_the_server_from_ending() -> None:
    with ServerProcess() as server, httpx.stream("GET", server.url + "/status/events") as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        server.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert not any(line.startswith('data: {"error"') for line in lines)
        assert time.monotonic() - started < 3, "as it is told to stop, and not when its patience ends"
        assert server.process.wait(60) == 0


def test_a_page_that_nobody_sees_lets_go(browser: Browser) -> None:
    with StatusServer(create_snapshot(create_row("r"))) as server:
        browser.open(server.url)
        wait_live(browser)
        assert server.feed.num_viewers == 1
        browser.ask(
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true }),"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        browser.wait_until('document.querySelector("#connection").dataset.state === "paused"')
        browser.ask("delete document.hidden, document.dispatchEvent(new Event('visibilitychange'))")
        wait_live(browser)

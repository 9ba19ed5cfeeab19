"""TLS for real: handshakes with a server on loopback, a renewed certificate, and files that do not work."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from engine_core import ConfigError
from server.access.secret import Secret
from server.access.tls import TlsFiles, create_context
from server.http.listener import bind, create_http_server, listen
from tests.server.tls_files import CERT_A, CERT_B, ENCRYPTED_KEY_A, KEY_A, KEY_B, PASSWORD

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return TlsFiles(write(tmp_path, "cert.pem", CERT_A), write(tmp_path, "key.pem", KEY_A))


def load(files: TlsFiles) -> ssl.SSLContext:
    context = create_context()
    files.load_into(context)
    return context


async def tell_scheme(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"connection", b"close"), (b"content-length", b"5")],
        }
    )
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@asynccontextmanager
async def serving(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server of ours on a free port, as the daemon makes it; yields the port."""
    with bind("127.0.0.1", 0) as sock:
        listen(sock)
        server = create_http_server(tell_scheme, grace_s=1, on_refusal=lambda status: None)
        server.use_tls(context)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            await task


def trust(certificate: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False
    return context


async def ask(
    port: int, context: ssl.SSLContext, request: bytes = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    with suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return answer


async def test_an_encrypted_request_is_answered_as_https(files: TlsFiles) -> None:
    async with serving(load(files)) as port:
        answer = await ask(port, trust(CERT_A))
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"https")


async def test_a_request_in_plain_text_gets_nothing(files: TlsFiles) -> None:
    async with serving(load(files)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        with suppress(ConnectionError):
            assert b"200" not in await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert (await ask(port, trust(CERT_A))).endswith(b"https"), "and nobody else is disturbed"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_no_tls_older_than_1_2_is_spoken(files: TlsFiles) -> None:
    old, new = trust(CERT_A), trust(CERT_A)
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    new.minimum_version = new.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(load(files)) as port:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(port, old)
        assert (await ask(port, new)).endswith(b"https")
    assert load(files).minimum_version is ssl.TLSVersion.TLSv1_2


async def test_a_refusal_of_the_parser_is_told_through_tls_too(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes its half of the connection, which TLS does not have."""
    monkeypatch.setattr("server.http.parser._LINGER_S", 0.05)
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    request = b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"
    async with serving(load(files)) as port:
        assert (await ask(port, trust(CERT_A), request)).startswith(b"HTTP/1.1 431 ")
    assert errors == []


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(files: TlsFiles) -> None:
    context = load(files)
    async with serving(context) as port:
        await ask(port, trust(CERT_A))
        assert files.keyfile is not None
        write(files.certfile.parent, "cert.pem", CERT_B)
        with pytest.raises(ConfigError, match=r"key\.pem is not the key of the certificate"):
            files.load_into(context)  # between the two files
        await ask(port, trust(CERT_A))
        write(files.keyfile.parent, "key.pem", KEY_B)
        files.load_into(context)
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(port, trust(CERT_A))
        assert (await ask(port, trust(CERT_B))).endswith(b"https")


def test_certificate_and_key_may_be_one_file(tmp_path: Path) -> None:
    load(TlsFiles(write(tmp_path, "both.pem", KEY_A + CERT_A)))


def test_an_encrypted_key_needs_its_password_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    cert, key = write(tmp_path, "cert.pem", CERT_A), write(tmp_path, "key.pem", ENCRYPTED_KEY_A)
    load(TlsFiles(cert, key, Secret(PASSWORD)))
    for password in (None, Secret("wrong")):
        with pytest.raises(ConfigError, match=r"key\.pem is encrypted, and --ssl-keyfile-password is missing or wrong"):
            load(TlsFiles(cert, key, password))


def test_files_that_do_not_work_are_named(tmp_path: Path) -> None:
    cert, key = write(tmp_path, "cert.pem", CERT_A), write(tmp_path, "key.pem", KEY_A)
    text = write(tmp_path, "text.pem", "no PEM at all")
    for files, complaint in (
        (TlsFiles(tmp_path / "absent.pem", key), r"absent\.pem is not there"),
        (TlsFiles(cert, tmp_path / "absent.pem"), r"absent\.pem is not there"),
        (TlsFiles(cert, write(tmp_path, "other.pem", KEY_B)), r"other\.pem is not the key of the certificate"),
        (TlsFiles(text, key), r"text\.pem and .*key\.pem cannot be used for TLS"),
        (TlsFiles(cert), r"cert\.pem cannot be used for TLS"),
        (TlsFiles(tmp_path, key), "cannot be used for TLS"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            load(files)


def test_a_socket_without_tls_stays_without() -> None:
    server = create_http_server(tell_scheme, grace_s=1, on_refusal=lambda status: None)
    server.config.load()
    assert server.config.ssl is None

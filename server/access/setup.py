"""Who may come in, and how: keys, hosts, origins and TLS, from the configuration to the application's middleware."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from engine_core import ConfigError
from server.access.api_keys import MIN_GOOD_CHARS, ApiKey, DuplicateKeyError, KeyRing
from server.access.auth import AuthMiddleware
from server.access.browser_guard import BrowserGuardMiddleware, HostRules
from server.access.file_watch import FileWatch, WatchedFiles
from server.access.key_file import read_key_file
from server.access.refusals import AccessMetrics, AccessRefusals
from server.access.tls import TlsFiles, create_context
from server.config import ServerConfig, is_loopback

logger = logging.getLogger(__name__)

# What a page of an allowed origin may read of an answer's head.
_EXPOSED_HEADERS = ("X-Request-Id", "Retry-After")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The terms on which requests come in; by itself: everybody, in plain text.

    Attributes:
        keys: Which open the server; None = it needs none.
        hosts: By which names it may be called where it needs no key; None = any.
        allowed_origins: Pages that may use it.
        tls: What connections are encrypted by; None = they are not.
        watch: Reads keys and certificate again when they change; whoever runs the application starts it.
    """

    keys: KeyRing | None = None
    hosts: HostRules | None = None
    allowed_origins: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None
    watch: FileWatch = field(default_factory=lambda: FileWatch(()))


def open_access(config: ServerConfig) -> Access:
    """Read what the configuration names.

    Raises:
        ConfigError: A file cannot be read or makes no sense.
    """
    watched: list[WatchedFiles] = []
    keys = _open_keys(config, watched) if config.has_keys else None
    tls = _open_tls(config, watched)
    if keys is not None and tls is None and not is_loopback(config.host):
        logger.warning(
            "API keys come over the network in plain text: set --ssl-certfile and --ssl-keyfile, or leave TLS to a "
            "proxy on this machine."
        )
    return Access(
        keys=keys,
        hosts=HostRules((config.host, *config.allowed_hosts)) if _has_host_check(config) else None,
        allowed_origins=config.allowed_origins,
        tls=tls,
        watch=FileWatch(watched),
    )


def add_access_middleware(app: FastAPI, access: Access, metrics: AccessMetrics) -> None:
    """Put the middleware around an application; what counts and labels requests belongs around it.

    Args:
        app: Which.
        access: The terms.
        metrics: Told of requests that do not come in.
    """
    refusals = AccessRefusals(metrics)
    if access.keys is not None:
        app.add_middleware(AuthMiddleware, keys=access.keys, refusals=refusals)
    if access.allowed_origins:
        # Around the keys: a browser asks before it sends one, and shows a page an error only with these headers.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    if access.keys is None:
        app.add_middleware(
            BrowserGuardMiddleware,
            hosts=access.hosts,
            allowed_origins=access.allowed_origins,
            refusals=refusals,
        )


def _has_host_check(config: ServerConfig) -> bool:
    return not config.has_keys and (is_loopback(config.host) or bool(config.allowed_hosts))


def _open_keys(config: ServerConfig, watched: list[WatchedFiles]) -> KeyRing:
    ring = KeyRing(shares_prefix_cache=config.share_prefix_cache)
    path = config.api_keys_file

    def load() -> None:
        keys = config.api_key if path is None else (*config.api_key, *read_key_file(path))
        try:
            ring.replace(keys)
        except DuplicateKeyError as error:
            raise ConfigError(f"--api-key and --api-keys-file: {error}") from None
        _warn_of_short_keys(keys)

    if path is not None:
        watched.append(WatchedFiles(f"API keys in {path}", (path,), load))
    load()
    return ring


def _warn_of_short_keys(keys: tuple[ApiKey, ...]) -> None:
    for number, key in enumerate(keys, start=1):
        if 0 < key.num_chars < MIN_GOOD_CHARS:
            logger.warning(
                "the API key %s has fewer than %d characters and can be guessed; `pointsman keygen` makes good ones",
                key.name or f"key{number}",
                MIN_GOOD_CHARS,
            )


def _open_tls(config: ServerConfig, watched: list[WatchedFiles]) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        return None
    files = TlsFiles(config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password)
    context = create_context()
    each = WatchedFiles("TLS certificate", files.paths, lambda: files.load_into(context))
    watched.append(each)
    each.load()
    return context

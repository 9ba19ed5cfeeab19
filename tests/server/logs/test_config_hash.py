from __future__ import annotations

import dataclasses
from pathlib import Path

from server.config import ServerConfig
from server.logs.config_hash import ServerStart, compute_config_hash

CONFIG = ServerConfig(cache_dir=Path("/c"))


def test_equal_settings_have_equal_names_and_others_others() -> None:
    name = compute_config_hash(CONFIG)
    assert name == compute_config_hash(dataclasses.replace(CONFIG)) and len(name) == 12
    others = [
        dataclasses.replace(CONFIG, port=1),
        dataclasses.replace(CONFIG, model="m"),
        dataclasses.replace(CONFIG, watermark=0.5),
        dataclasses.replace(CONFIG, insecure=True),
    ]
    assert len({name, *map(compute_config_hash, others)}) == 5


def test_secrets_are_no_part_of_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class Keyed:
        port: int = 1
        api_key: tuple[str, ...] = ()
        api_keys_file: str | None = None
        ssl_keyfile: str | None = None

    secret = Keyed(api_key=("sk-secret",), api_keys_file="/keys", ssl_keyfile="/tls")
    assert compute_config_hash(secret) == compute_config_hash(Keyed())  # type: ignore[arg-type]
    assert compute_config_hash(Keyed(port=2)) != compute_config_hash(Keyed())  # type: ignore[arg-type]


def test_the_start_is_told_in_words_and_by_name() -> None:
    start = ServerStart("1.2.3", "abc")
    assert str(start) == "Pointsman 1.2.3 starts, configuration abc"
    assert start.fields == {"version": "1.2.3", "config_hash": "abc"}

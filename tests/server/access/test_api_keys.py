from __future__ import annotations

import hashlib
import hmac

import pytest

from server.access import api_keys
from server.access.api_keys import (
    ApiKey,
    DuplicateKeyError,
    KeyRing,
    format_digest_line,
    generate_key,
    parse_api_key,
    parse_api_keys,
)
from server.principal import Scope

SECRET = "sk-0123456789abcdef"
DIGEST = hashlib.sha256(SECRET.encode())


@pytest.mark.parametrize(
    ("text", "name", "scopes"),
    [
        (SECRET, "", {Scope.USER}),
        (f"alice:user:{SECRET}", "alice", {Scope.USER}),
        (f"prom.1:metrics:{SECRET}", "prom.1", {Scope.METRICS}),
        (f"ops:user+metrics:{SECRET}", "ops", {Scope.USER, Scope.METRICS}),
        (f"root:admin:sha256:{DIGEST.hexdigest()}", "root", {Scope.ADMIN}),
        (f"root:admin:sha256:{DIGEST.hexdigest().upper()}", "root", {Scope.ADMIN}),
    ],
)
def test_each_form_of_a_key_opens_with_the_key_itself(text: str, name: str, scopes: set[Scope]) -> None:
    key = parse_api_key(text)
    assert (key.name, key.scopes, key.digest) == (name, scopes, DIGEST.digest())
    principal = KeyRing([key]).find(SECRET.encode())
    assert principal is not None
    assert (principal.key_id, principal.scopes) == (name or "key1", scopes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "two words",
        "ключ",
        "a,b",
        f"alice:{SECRET}",
        f"alice:boss:{SECRET}",
        f"alice::{SECRET}",
        f"alice:user+:{SECRET}",
        f":user:{SECRET}",
        f"a b:user:{SECRET}",
        f"{'a' * 65}:user:{SECRET}",
        f"new\nline:user:{SECRET}",
        "alice:user:",
        "alice:user:sha256:",
        f"alice:user:sha256:{SECRET}",
        f"alice:user:sha256:{DIGEST.hexdigest()}0",
    ],
)
def test_what_is_no_key_is_refused_and_never_repeated(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_api_key(text)
    assert "must " in str(caught.value)
    assert SECRET not in str(caught.value) and DIGEST.hexdigest() not in str(caught.value)


def test_several_keys_stand_between_commas() -> None:
    assert [key.name for key in parse_api_keys(f"a:user:{SECRET}, b:admin:{SECRET}2 ,{SECRET}3")] == ["a", "b", ""]


def test_nothing_that_can_be_printed_holds_a_key_or_its_digest() -> None:
    key = parse_api_key(f"alice:user:{SECRET}")
    ring = KeyRing([key])
    told = repr(key) + str(key) + repr(ring) + repr(ring.find(SECRET.encode())) + repr(vars(ring).keys())
    for part in (SECRET, DIGEST.hexdigest(), repr(DIGEST.digest())[2:-1]):
        assert part not in told


@pytest.mark.parametrize("key", [b"", b"x", SECRET.encode()[:-1], SECRET.encode() + b" ", SECRET.encode() + b"\0"])
def test_no_other_key_opens(key: bytes) -> None:
    assert KeyRing([parse_api_key(SECRET)]).find(key) is None


@pytest.mark.parametrize("num_keys", [1, 3, 1000])
def test_one_digest_is_compared_whether_or_not_there_is_such_a_key(
    monkeypatch: pytest.MonkeyPatch, num_keys: int
) -> None:
    """CVE-2025-59425: the time until a key was refused told how much of it was right."""
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, given)

    class SpyingHmac:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(api_keys, "hmac", SpyingHmac)
    ring = KeyRing([parse_api_key(f"key-{number}") for number in range(num_keys)])
    found = [ring.find(key) for key in (b"key-0", f"key-{num_keys - 1}".encode(), b"key-", b"other")]
    assert [principal is not None for principal in found] == [True, True, False, False]
    assert len(compared) == 4
    assert all(len(digest) == 32 for digest in compared), "digests are compared, not texts of any length"


def test_where_a_digest_stands_follows_from_no_digest_and_is_another_place_in_another_process() -> None:
    key = parse_api_key(SECRET)
    rings = [KeyRing([key]), KeyRing([key])]
    places = {place for ring in rings for place in ring._entries}
    assert len(places) == 2 and key.digest not in places
    for ring in rings:
        ring.replace([parse_api_key("other"), key])
        assert ring.find(SECRET.encode()) is not None


def test_no_key_at_all_opens_nothing() -> None:
    assert KeyRing().find(b"") is None


def test_two_keys_of_one_name_are_one_holder_whose_prefixes_are_still_apart() -> None:
    ring = KeyRing(parse_api_keys("a:user:old-key,a:user:new-key"))
    old, new = ring.find(b"old-key"), ring.find(b"new-key")
    assert old is not None and new is not None
    assert old.key_id == new.key_id == "a"
    assert old.cache_salt != new.cache_salt


def test_prefixes_are_shared_only_where_that_is_asked_for() -> None:
    keys = parse_api_keys("a,b")
    apart, shared = KeyRing(keys), KeyRing(keys, shares_prefix_cache=True)
    salts = [[ring.find(key).cache_salt for key in (b"a", b"b")] for ring in (apart, shared)]  # type: ignore[union-attr]
    assert len(set(salts[0])) == 2 and all(salts[0])
    assert salts[1] == ["", ""]


def test_a_ring_takes_new_keys_and_forgets_the_old_ones() -> None:
    ring = KeyRing(parse_api_keys("old"))
    ring.replace(parse_api_keys("new"))
    assert ring.find(b"old") is None and ring.find(b"new") is not None and len(ring) == 1


def test_a_key_that_stands_there_twice_is_refused_and_nothing_changes() -> None:
    ring = KeyRing(parse_api_keys("old"))
    with pytest.raises(DuplicateKeyError, match=r"the key b stands there twice"):
        ring.replace(parse_api_keys("a:user:same,b:admin:same"))
    assert ring.find(b"old") is not None


def test_a_generated_key_is_long_and_its_line_knows_it() -> None:
    key, other = generate_key(), generate_key()
    assert key != other and len(key) > 40
    line = format_digest_line("alice", {Scope.USER, Scope.METRICS}, key)
    assert key not in line
    assert parse_api_key(line) == ApiKey(
        "alice", frozenset({Scope.USER, Scope.METRICS}), hashlib.sha256(key.encode()).digest()
    )

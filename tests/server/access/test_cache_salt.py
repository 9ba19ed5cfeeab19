"""Salts of the prefix cache: what a key adds, and that no two pairs of parts make the same."""

from __future__ import annotations

import hashlib
import itertools

from server.access.cache_salt import combine_salts, derive_key_salt

DIGESTS = [hashlib.sha256(name).digest() for name in (b"a", b"b")]


def test_a_keys_salt_is_its_own_and_tells_nothing_of_the_digest() -> None:
    first, second = map(derive_key_salt, DIGESTS)
    assert first != second and derive_key_salt(DIGESTS[0]) == first
    assert DIGESTS[0].hex() not in first


def test_f10_parts_that_run_into_each_other_make_different_salts() -> None:
    """Field report F10: ("org_1", "2345") was ("org_12345", "")."""
    parts = ("", "o", "org_1", "org_12345", "2345", "1", "5:org_1", "0:")
    pairs = list(itertools.product(parts, parts))
    assert len({combine_salts(*pair) for pair in pairs}) == len(pairs)


def test_nobody_with_a_key_can_write_anothers_salt() -> None:
    mine, theirs = map(derive_key_salt, DIGESTS)
    others = {combine_salts(theirs, ""), combine_salts(theirs, "x"), combine_salts("", ""), combine_salts("", "x")}
    tries = ["", "x", theirs, combine_salts(theirs, ""), combine_salts(theirs, "x"), f"{mine}{theirs}"]
    assert not others & {combine_salts(mine, each) for each in tries}


def test_without_any_there_is_none_so_that_such_requests_share() -> None:
    assert combine_salts("", "") == ""

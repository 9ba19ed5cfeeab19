"""API keys: from their text to digests, and from a request's key to who sends it. Pure; keeps digests, never keys.

No message here repeats a key, not even a malformed one: messages end up in logs and on screens.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from server.access.cache_salt import derive_key_salt
from server.principal import Principal, Scope

KEY_FORMS = "KEY, NAME:SCOPE:KEY or NAME:SCOPE:sha256:DIGEST"
# Shorter ones can be guessed, offline and in time, by whoever gets to see a digest.
MIN_GOOD_CHARS = 16
_DIGEST_PREFIX = "sha256:"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
# What a header can carry without quoting, but for the comma, which parts keys in the environment's variable.
_KEY = re.compile(r"[!-+\--~]+", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_KEY_BYTES = 32
# Compared with where no key is: no key has it.
_NO_DIGEST = bytes(hashlib.sha256().digest_size)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key that is known here.

    Attributes:
        name: For logs, limits and metrics; empty = by its place in the list.
        scopes: What it opens.
        digest: sha256 of the key.
        num_chars: Its length; 0 where only its digest was given.
    """

    name: str
    scopes: frozenset[Scope]
    digest: bytes = field(repr=False)
    num_chars: int = field(default=0, repr=False)


class DuplicateKeyError(ValueError):
    """One key stands there twice, so nobody could say which of the two a request came with."""


class KeyRing:
    """The keys that open this server.

    Args:
        keys: To begin with.
        shares_prefix_cache: Their holders share cached prefixes.

    Raises:
        DuplicateKeyError: One of them stands there twice.
    """

    def __init__(self, keys: Sequence[ApiKey] = (), *, shares_prefix_cache: bool = False) -> None:
        self._shares_prefix_cache = shares_prefix_cache
        # The place of a digest in the table follows from a secret that ends with this process: how long a look-up takes
        # tells nothing of the digests beside it to whoever knows what he sends.
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self._entries: dict[bytes, tuple[bytes, Principal]] = {}
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._entries)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Know these keys from here on, and no others. Whatever is under way goes on.

        Raises:
            DuplicateKeyError: One of them stands there twice; the old ones stay.
        """
        digests: set[bytes] = set()
        entries = {}
        for number, key in enumerate(keys, start=1):
            if key.digest in digests:
                raise DuplicateKeyError(f"the key {key.name or f'no. {number}'} stands there twice; remove one of them")
            digests.add(key.digest)
            salt = "" if self._shares_prefix_cache else derive_key_salt(key.digest)
            principal = Principal(key.name or f"key{number}", key.scopes, salt)
            entries[self._find_place(key.digest)] = (key.digest, principal)
        self._entries = entries

    def find(self, key: bytes) -> Principal | None:
        """Return who holds a key, or None. It takes as long for one that is wrong as for one that is right.

        However many there are, one is compared: a thousand, one by one, took 47 to 182 us of every request.
        """
        digest = hashlib.sha256(key).digest()
        known, principal = self._entries.get(self._find_place(digest), (_NO_DIGEST, None))
        return principal if hmac.compare_digest(known, digest) else None

    def _find_place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=_KEY_BYTES).digest()


def parse_api_key(text: str) -> ApiKey:
    """Read one key in any of KEY_FORMS. SCOPE is user, admin or metrics, or several joined by +.

    Raises:
        ValueError: It has none of these forms.
    """
    if ":" not in text:
        return _build(name="", scopes=frozenset({Scope.USER}), key=text)
    name, _, rest = text.partition(":")
    scopes, colon, key = rest.partition(":")
    if not colon:
        raise ValueError(f"must be {KEY_FORMS}")
    if not _NAME.fullmatch(name):
        raise ValueError("must have a NAME of at most 64 letters, digits, dots, dashes and underscores")
    if key.startswith(_DIGEST_PREFIX):
        digest = key.removeprefix(_DIGEST_PREFIX)
        if not _HEX.fullmatch(digest):
            raise ValueError(f"must have a DIGEST of 64 hexadecimal digits for {name}")
        return ApiKey(name, _parse_scopes(scopes, name), bytes.fromhex(digest))
    return _build(name=name, scopes=_parse_scopes(scopes, name), key=key)


def parse_api_keys(text: str) -> tuple[ApiKey, ...]:
    """Read one key or several, with commas between them; errors as for parse_api_key."""
    return tuple(parse_api_key(part.strip()) for part in text.split(","))


def generate_key() -> str:
    """Return a new key, of 256 random bits."""
    return "sk-" + secrets.token_urlsafe(_KEY_BYTES)


def format_digest_line(name: str, scopes: Iterable[Scope], key: str) -> str:
    """Return the line by which a file of keys knows a key without holding it."""
    joined = "+".join(sorted(scopes))
    return f"{name}:{joined}:{_DIGEST_PREFIX}{hashlib.sha256(key.encode()).hexdigest()}"


def parse_key_name(text: str) -> str:
    """Return the name of a key.

    Raises:
        ValueError: It cannot be one.
    """
    if not _NAME.fullmatch(text):
        raise ValueError("must be at most 64 letters, digits, dots, dashes and underscores")
    return text


def parse_key_scopes(text: str) -> frozenset[Scope]:
    """Return the scopes that are joined by +.

    Raises:
        ValueError: One of them is none.
    """
    return _parse_scopes(text, "this key")


def _parse_scopes(text: str, name: str) -> frozenset[Scope]:
    try:
        return frozenset(map(Scope, text.split("+")))
    except ValueError:
        raise ValueError(f"must have a SCOPE of user, admin or metrics, or several joined by +, for {name}") from None


def _build(*, name: str, scopes: frozenset[Scope], key: str) -> ApiKey:
    if not _KEY.fullmatch(key):
        whose = f"for {name}" if name else f"({KEY_FORMS})"
        raise ValueError(f"must have a key of visible ASCII characters without a comma {whose}")
    return ApiKey(name, scopes, hashlib.sha256(key.encode()).digest(), len(key))

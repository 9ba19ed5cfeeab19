"""What keeps one key's cached prefixes apart from another's. Pure.

A client writes the salt in its body and could write anybody's, so that one only divides further what its key owns.
"""

from __future__ import annotations

import hashlib


def derive_key_salt(digest: bytes) -> str:
    """Return the salt of an API key, which tells nothing of its digest."""
    return hashlib.sha256(b"pointsman: prefix cache" + digest).hexdigest()


def combine_salts(key_salt: str, body_salt: str) -> str:
    """Return one salt for the two; different pairs never give the same.

    Args:
        key_salt: The key's; empty where prefixes are shared among keys.
        body_salt: The request's own; empty where it sent none.

    Returns:
        Empty where both are: such requests share with each other.
    """
    if not key_salt and not body_salt:
        return ""
    return f"{len(key_salt)}:{key_salt}{body_salt}"

from __future__ import annotations

import pytest

from server.access.secret import Secret, parse_secret


def test_a_secret_shows_itself_only_when_it_is_asked_to() -> None:
    secret = parse_secret("hush")
    assert secret.reveal() == "hush"
    assert "hush" not in f"{secret} {secret!r} {[secret]}"
    assert not hasattr(secret, "__dict__")
    assert secret != Secret("hush") and secret != "hush"


def test_an_empty_one_is_none() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        parse_secret("")

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine_core import ConfigError
from server.access.api_keys import format_digest_line
from server.access.key_file import read_key_file
from server.principal import Scope

SECRET = "sk-0123456789abcdef"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_one_key_a_line_with_comments_and_digests(tmp_path: Path) -> None:
    lines = ("# who may come in", "", f"  alice:user:{SECRET}  ", format_digest_line("prom", [Scope.METRICS], "x"), "k")
    keys = read_key_file(write(tmp_path / "keys", "\r\n".join(lines)))
    assert [(key.name, key.num_chars) for key in keys] == [("alice", len(SECRET)), ("prom", 0), ("", 1)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no key"),
        ("# alice:user:x\n\n", "holds no key"),
        (f"alice:user:{SECRET}\nbob:boss:{SECRET}\n", "line 2 must have a SCOPE"),
        (f"alice:user:{SECRET} # a comment\n", "line 1 must have a key"),
    ],
)
def test_a_file_that_makes_no_sense_is_named_without_its_keys(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path / "keys", text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_key_file(path)
    assert str(path) in str(caught.value) and SECRET not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent cannot be read: No such file"):
        read_key_file(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        read_key_file(tmp_path)
    with pytest.raises(ConfigError, match="is it the right file"):
        read_key_file(Path("/dev/zero"))


def test_what_is_no_text_is_refused_like_any_other_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"alice:user:\xff\xfe\x00\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_key_file(path)


def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod o-w"):
        read_key_file(write(tmp_path / "keys", SECRET, 0o602))


@pytest.mark.parametrize(
    ("text", "mode", "is_warned"),
    [
        (SECRET, 0o600, False),
        (SECRET, 0o640, False),
        (SECRET, 0o644, True),  # as Kubernetes mounts a secret: told, and taken
        (format_digest_line("a", [Scope.USER], SECRET), 0o644, False),
    ],
)
def test_keys_that_everybody_may_read_are_warned_of_digests_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, mode: int, is_warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(read_key_file(write(tmp_path / "keys", text, mode))) == 1
    assert ("chmod 600" in caplog.text) == is_warned
    assert SECRET not in caplog.text

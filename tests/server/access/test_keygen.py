from __future__ import annotations

import pytest

from server.access.api_keys import KeyRing, parse_api_key
from server.cli import main
from server.principal import Scope


def test_the_key_goes_to_whoever_uses_it_and_the_line_to_whoever_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", "alice", "--scope", "user+metrics"]) == 0
    told = capsys.readouterr()
    key, line = told.out.strip(), told.err.strip()
    assert key not in line and "\n" not in key + line
    principal = KeyRing([parse_api_key(line)]).find(key.encode())
    assert principal is not None
    assert (principal.key_id, principal.scopes) == ("alice", {Scope.USER, Scope.METRICS})


@pytest.mark.parametrize("argv", [["keygen"], ["keygen", "a b"], ["keygen", "a", "--scope", "boss"]])
def test_a_mistake_is_a_sentence(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1

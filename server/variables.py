"""Variables that look like ours and are not: misspelt ones, which would be ignored without a word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from server.flags import ENV_PREFIX

# What Kubernetes sets for a Service named pointsman, and what benches read. PORT is a flag, whose parser knows both.
_OTHERS = re.compile(r"(SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?|BENCH_.*|PEER_.*|TEST_.*)")


def find_unknown_variables(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str | None]:
    """Return the variables with our prefix that set nothing, each with the nearest that does, or None.

    Args:
        environment: As os.environ.
        names: Of the fields that can be set.
    """
    known = {ENV_PREFIX + name.upper() for name in names}
    found = {}
    for variable in sorted(environment):
        # Lower case too: on Linux pointsman_port is another variable, and no less a mistake.
        if not variable.upper().startswith(ENV_PREFIX) or variable in known:
            continue
        if not _OTHERS.fullmatch(variable.upper().removeprefix(ENV_PREFIX)):
            found[variable] = _find_nearest(variable.upper().removeprefix(ENV_PREFIX), known)
    return found


def _find_nearest(name: str, known: Iterable[str]) -> str | None:
    # Without the prefix, which would make everything alike.
    names = sorted(variable.removeprefix(ENV_PREFIX) for variable in known)
    return next((ENV_PREFIX + near for near in difflib.get_close_matches(name, names, n=1)), None)


def describe_unknown_variable(variable: str, nearest: str | None) -> str:
    """Return the sentence that the operator reads."""
    hint = f"did you mean {nearest}?" if nearest else "pointsman serve --help lists what there is."
    return f"{variable} sets nothing and is ignored; {hint}"

"""What of a request field's name may stand in a log line and a metric's label: clients choose these names."""

from __future__ import annotations

import re

MAX_CHARS = 64
# messages[0].tool-calls is one; nothing that ends a line, a quoted text or a label is.
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def clean_field_name(name: str) -> str:
    """Return the name with a question mark for each unusual character, cut to MAX_CHARS."""
    return _NOT_IN_NAME.sub("?", name[:MAX_CHARS])

"""The page at /status: its parts, put together once into one answer that needs nothing else, and what it may do.

It holds no data: that comes by /status/events, which asks for a key where there are keys.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

_STATIC = Path(__file__).parent.parent / "static"
# In this order; all are one script, so that they share names.
_SCRIPTS = ("status_format.js", "status_charts.js", "status_tables.js", "status_stream.js", "status.js")
_STYLE_MARK, _SCRIPT_MARK = "/*style*/", "/*script*/"


@dataclass(frozen=True, slots=True)
class Page:
    """What a browser gets.

    Attributes:
        body: HTML.
        content_policy: The Content-Security-Policy under which it works.
    """

    body: bytes
    content_policy: str


@functools.cache
def load_page() -> Page:
    """Return the page."""
    style = (_STATIC / "status.css").read_text(encoding="utf-8")
    script = "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    html = (_STATIC / "status.html").read_text(encoding="utf-8")
    return Page(
        body=html.replace(_STYLE_MARK, style).replace(_SCRIPT_MARK, script).encode(),
        # The hashes let run what stands in the page, and nothing that might ever get into it.
        content_policy="; ".join(
            (
                "default-src 'self'",
                f"script-src {_hash(script)}",
                f"style-src {_hash(style)}",
                "img-src data:",  # its icon: none, said in the page, so that nobody asks for one
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            )
        ),
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"

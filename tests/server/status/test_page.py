from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from pathlib import Path

from server.status.page import load_page

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "server" / "static"


def get_part(tag: str) -> str:
    """The content of the page's one element of that name."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", load_page().body.decode(), re.S)
    return str(content)


def test_the_policy_lets_run_exactly_what_is_in_the_page() -> None:
    policy = dict(part.split(" ", 1) for part in load_page().content_policy.split("; "))
    assert policy["default-src"] == "'self'"
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        digest = base64.b64encode(hashlib.sha256(get_part(tag).encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'", "no unsafe-inline, no eval, nothing from elsewhere"
    assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"


def test_the_page_names_nothing_outside_and_has_no_handlers_or_styles_of_its_own() -> None:
    html = load_page().body.decode()
    assert not re.search(r"(?:src|href)=\"(?!data:,|status\.json)", html)
    assert "://" not in html
    assert not re.search(r"\son\w+=|\sstyle=", html), "the policy would block them"


def test_untrusted_text_is_never_read_as_html() -> None:
    script = get_part("script")
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert dangerous not in script


def test_every_file_is_part_of_the_page_and_of_the_package() -> None:
    page = load_page().body.decode()
    for path in STATIC.iterdir():
        if path.suffix in (".js", ".css"):
            assert path.read_text(encoding="utf-8") in page, f"{path.name} is in no page"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (pattern,) = project["tool"]["setuptools"]["package-data"]["server"]
    packaged = set((ROOT / "server").glob(pattern))
    assert packaged == set(STATIC.iterdir())


def test_the_marks_are_gone_and_no_script_ends_early() -> None:
    html = load_page().body.decode()
    assert "/*style*/" not in html and "/*script*/" not in html
    assert html.count("</script>") == html.count("</style>") == 1

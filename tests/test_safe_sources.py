"""What the sources must not hold, whatever they do: pickles, code made of data, and doors to disk or network in places
that clients' words reach."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_house import ROOT, imports, source_files

# Each of these can run code that comes with the data.
UNPICKLERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "jsonpickle",
    "yaml",
}
# Names that turn data into code, or into objects of any class, by what they are called on.
DANGEROUS_CALLS = {
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "np.load", "numpy.load", "os.system", "os.popen"),
    *("eval", "exec", "compile", "__import__", "runpy.run_path", "pty.spawn"),
}
DANGEROUS_METHODS = {"extractall", "unpack_archive", "allow_pickle", "read_pickle"}
# Who starts programs: pip for the embedded model, a C++ compiler. Neither ever sees a client's word.
MAY_START_PROGRAMS = {"server/model_resolver.py", "kernels/cpu_compiler.py"}
NETWORK_CLIENTS = {"requests", "httpx", "aiohttp", "urllib.request", "urllib3", "http.client", "ftplib", "smtplib"}
# Through these a client's words pass. They open no file, connect to nothing, and start nothing.
ON_A_REQUESTS_PATH = (
    *("server/protocol.py", "server/wire_types.py", "server/wire_values.py", "server/json_text.py"),
    *("server/request_reader.py", "server/field_names.py", "server/http/limits.py", "server/http/parser.py"),
    *("server/access/auth.py", "server/access/api_keys.py", "server/access/browser_guard.py", "server/principal.py"),
    *("server/admission.py", "server/admission_limits.py", "server/prompts.py", "server/prompt_threads.py"),
    *("server/chat_template.py", "server/template_budget.py", "server/template_sandbox.py"),
    *("server/generation.py", "server/output_processor.py", "server/output_text.py", "server/output_stream.py"),
    *("server/stop_strings.py", "server/detokenizer.py", "server/streaming.py", "server/replies.py", "server/sse.py"),
    *("server/routes/chat.py", "server/routes/completions.py", "server/routes/generation.py"),
    *("server/routes/render.py", "server/routes/tokenize.py", "server/routes/models.py"),
)
DOORS_OUT = {
    *("os", "io.open", "pathlib", "shutil", "tempfile", "socket", "ssl", "subprocess", "urllib", "glob", "mmap"),
    *("huggingface_hub", "asyncio.subprocess", "importlib", *NETWORK_CLIENTS),
}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def calls(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file calls, as far as they are spelt out."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            parts = []
            function = node.func
            while isinstance(function, ast.Attribute):
                parts.append(function.attr)
                function = function.value
            parts.append(function.id if isinstance(function, ast.Name) else "")
            yield ".".join(reversed(parts))


def check_makes_no_code_of_data(path: Path) -> None:
    for name in imports(path):
        assert name.split(".")[0] not in UNPICKLERS, f"{path} imports {name}"
    for name in calls(path):
        assert name not in DANGEROUS_CALLS, f"{path} calls {name}"
        assert name.rpartition(".")[2] not in DANGEROUS_METHODS, f"{path} calls {name}"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.keyword):
            assert node.arg not in ("shell", "allow_pickle", "trust_remote_code"), f"{path}:{node.value.lineno}"


def test_nothing_unpickles_and_no_data_becomes_code() -> None:
    for path in source_files():
        check_makes_no_code_of_data(path)


def test_no_path_is_put_together_with_the_host_header() -> None:
    """CVE-2026-48710: `request.url` is, so that its path may be another than the one that was routed."""
    for path in source_files():
        for node in ast.walk(parse(path)):
            is_url = (
                isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "url"
            )
            assert not is_url, f"{path} reads a part of a url: take scope['path']"
        assert "URL" not in set(calls(path))


def test_programs_are_started_in_few_places() -> None:
    for path in source_files():
        if str(path.relative_to(ROOT)) in MAY_START_PROGRAMS:
            continue
        started = {name for name in imports(path) if name.split(".")[0] in ("subprocess", "multiprocessing", "pty")}
        assert not started, f"{path} imports {started}"
        starters = ("os.exec", "os.spawn", "os.posix_spawn", "os.fork", "asyncio.create_subprocess")
        assert not [name for name in calls(path) if name.startswith(starters)], path


def test_nobody_is_a_client_of_the_network_but_the_hubs_own_library() -> None:
    for path in source_files():
        for name in imports(path):
            assert not any(name == each or name.startswith(each + ".") for each in NETWORK_CLIENTS), f"{path}: {name}"


@pytest.mark.parametrize("name", ON_A_REQUESTS_PATH)
def test_what_clients_send_passes_no_door_to_disk_or_network(name: str) -> None:
    path = ROOT / name
    for each in imports(path):
        assert not any(each == door or each.startswith(door + ".") for door in DOORS_OUT), f"{name} imports {each}"
    assert "open" not in set(calls(path)), f"{name} opens a file"


def test_templates_are_rendered_by_one_sandbox() -> None:
    """CVE-2026-5760: one of several renderers was made without it."""
    makers = {
        str(path.relative_to(ROOT)) for path in source_files() if "jinja2" in {n.split(".")[0] for n in imports(path)}
    }
    assert makers == {"server/chat_template.py", "server/template_sandbox.py"}
    assert not any("Environment" in name or name == "Template" for name in calls(ROOT / "server/chat_template.py"))


def test_the_rules_notice_what_they_forbid(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text('"""Doc."""\nimport torch\nx = torch.load("f")\ny = a.b().extractall()\nz = eval("1")\n')
    assert {"torch.load", "eval"} <= set(calls(path))
    assert any(each.endswith(".extractall") for each in calls(path))
    with pytest.raises(AssertionError):
        check_makes_no_code_of_data(path)

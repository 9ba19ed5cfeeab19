"""Variables that hurt, and how each is told."""

from __future__ import annotations

import pytest

from server.config import field_names
from server.doctor.environment_checks import check_environment, check_hub
from server.doctor.findings import Finding, Level


def look(**environment: str) -> list[Finding]:
    return list(check_environment(environment, field_names()))


def test_nothing_to_say() -> None:
    (found,) = look(PATH="/bin", POINTSMAN_PORT="1", PYTHONDEVMODE="", OMP_PROC_BIND="false")
    assert found.level is Level.OK


@pytest.mark.parametrize(
    ("variable", "value", "level", "says"),
    [
        ("POINTSMAN_MAX_NUM_SEQ", "8", Level.WARNING, "POINTSMAN_MAX_NUM_SEQ sets nothing"),
        ("OMP_PROC_BIND", "close", Level.WARNING, "pins threads"),
        ("GOMP_CPU_AFFINITY", "0-3", Level.WARNING, "pins threads"),
        ("OMP_NUM_THREADS", "4", Level.NOTE, "no effect"),
        ("PYTHONDEVMODE", "1", Level.WARNING, "PYTHONDEVMODE is set"),
        ("PYTHONMALLOC", "malloc_debug", Level.WARNING, "PYTHONMALLOC"),
        ("ATEN_CPU_CAPABILITY", "default", Level.WARNING, "better instructions"),
        ("ONEDNN_MAX_CPU_ISA", "avx2", Level.WARNING, "better instructions"),
        ("HTTPS_PROXY", "http://proxy:3128", Level.NOTE, "127.0.0.1"),
    ],
)
def test_a_variable_that_hurts(variable: str, value: str, level: Level, says: str) -> None:
    (found,) = look(**{variable: value})
    assert found.level is level and says in found.says and found.todo.endswith((".", "?"))


def test_a_proxy_that_leaves_this_machine_alone_needs_nothing_done() -> None:
    (found,) = look(https_proxy="http://proxy:3128", NO_PROXY="10.0.0.0/8, localhost")
    assert found.level is Level.NOTE and found.todo == ""


def test_the_nearest_name_is_what_to_do() -> None:
    (found,) = look(POINTSMAN_MAX_NUM_SEQ="8")
    assert found.todo == "Did you mean POINTSMAN_MAX_NUM_SEQS?"


def test_an_offline_hub_matters_only_where_something_must_be_downloaded() -> None:
    assert not list(check_hub({"HF_HUB_OFFLINE": "1"}, must_download=False))
    assert not list(check_hub({"HF_HUB_OFFLINE": "0"}, must_download=True))
    (found,) = check_hub({"HF_HUB_OFFLINE": "1"}, must_download=True)
    assert found.level is Level.WARNING

"""The doctor's forecast beside what serve prints, in every precision: two processes each."""

from __future__ import annotations

import pytest

from tests.e2e.test_doctor import check_forecast


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--quantization", "none"),
        ("--quantization", "int8"),
        ("--quantization", "int4"),
        ("--kv-cache-dtype", "int8"),
        ("--dtype", "fp32"),
    ],
    ids=["auto", "none", "int8", "int4", "KV int8", "fp32, layer by layer"],
)
def test_serve_prints_what_the_doctor_said(flags: tuple[str, ...]) -> None:
    check_forecast(*flags)

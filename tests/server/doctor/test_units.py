import pytest

from server.doctor.units import format_count, format_size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (2**20, "1.00 MiB"), (93 * 2**20, "93 MiB"), (3 * 2**39, "1.50 TiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_counts() -> None:
    assert (format_count(1, "thread"), format_count(2000, "thread")) == ("1 thread", "2,000 threads")

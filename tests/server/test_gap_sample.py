import random
import statistics
import sys

import pytest

from server.gap_sample import GapSample
from tests.server.http_records import create_gaps


def test_no_gap_has_no_median() -> None:
    assert GapSample().get_median() is None


@pytest.mark.parametrize(("gaps", "median"), [((0.5,), 0.5), ((3.0, 1.0, 2.0), 2.0), ((1.0, 2.0, 3.0, 4.0), 3.0)])
def test_the_median_of_a_few_is_exact(gaps: tuple[float, ...], median: float) -> None:
    assert create_gaps(*gaps).get_median() == median


def test_the_median_of_many_is_close_and_takes_little_memory() -> None:
    rng = random.Random(1)
    gaps = [rng.lognormvariate(-3.5, 0.5) for _ in range(100_000)]
    sample = create_gaps(*gaps)
    assert sample.get_median() == pytest.approx(statistics.median(gaps), rel=0.15)
    assert len(sample._kept) < 243
    assert sys.getsizeof(sample._kept) < 4000


@pytest.mark.parametrize("period", [2, 4, 5])
def test_gaps_that_alternate_are_not_taken_for_all_alike(period: int) -> None:
    # Every `period`-th gap is long, as where a long prompt shares the steps; the sample must hold both kinds.
    sample = create_gaps(*[1.0 if number % period == 0 else 0.1 for number in range(5000)])
    share = sample._kept.count(1.0) / len(sample._kept)
    assert share == pytest.approx(1 / period, abs=0.05)


def test_what_is_kept_is_spread_over_the_whole_stream() -> None:
    sample = create_gaps(*map(float, range(1, 1001)))
    assert sample._kept == sorted(sample._kept)
    assert sample._kept[0] < 20 and sample._kept[-1] > 980

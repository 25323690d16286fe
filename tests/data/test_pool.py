import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from aphq.data.pool import in_order


@pytest.mark.parametrize("threads", [1, 4])
def test_results_keep_the_order_of_the_items(threads: int) -> None:
    def work(i: int) -> int:
        time.sleep(0.002 * (i % 3))  # later items overtake earlier ones
        return i * i

    assert list(in_order(work, range(40), threads=threads)) == [i * i for i in range(40)]


def test_runs_ahead_of_the_reader_by_no_more_than_asked() -> None:
    started: list[int] = []
    stream = in_order(lambda i: started.append(i), range(1000), threads=2, ahead=5)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert 1 <= len(started) <= 6


def test_an_error_reaches_the_reader_and_ends_the_threads() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda i: 1 // i, [1, 0, 1], threads=2))
    assert threading.active_count() == before


def test_nothing_in_nothing_out() -> None:
    assert list(in_order(str, [])) == []


def test_works_inside_another_pool() -> None:
    with ThreadPoolExecutor(2) as pool:
        sums = list(pool.map(lambda n: sum(in_order(int, range(n), threads=2)), [3, 4]))
    assert sums == [3, 6]

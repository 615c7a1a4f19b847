"""PagePool counts who holds a page; what is counted wrongly is an error at once."""

import pytest

from emberbox.engine.pages import PagePool


def test_pages_leave_in_order_and_come_back():
    pool = PagePool(4)
    assert pool.take(3) == (0, 1, 2)
    assert (pool.num_free, pool.num_available) == (1, 1)
    pool.release((1,))
    assert pool.take(2) == (1, 3)
    assert (pool.num_free, pool.num_available) == (0, 0)
    assert pool.take(0) == ()


def test_a_shared_page_is_free_after_its_last_release():
    pool = PagePool(2)
    pages = pool.take(2)
    pool.share(pages)
    pool.release(pages)
    assert (pool.num_free, pool.is_used(0)) == (0, True)
    pool.release(pages)
    assert (pool.num_free, pool.is_used(0)) == (2, False)


def test_what_only_a_snapshot_keeps_is_available_but_not_free():
    pool = PagePool(3)
    pages = pool.take(2)
    pool.keep(pages)
    assert (pool.num_free, pool.num_available) == (1, 1)
    pool.release(pages)
    assert (pool.num_free, pool.num_available, pool.is_used(0)) == (1, 3, False)
    pool.share(pages[:1])
    assert (pool.num_free, pool.num_available, pool.is_used(0)) == (1, 2, True)
    pool.drop(pages)
    assert (pool.num_free, pool.num_available) == (2, 2)
    pool.release(pages[:1])
    assert (pool.num_free, pool.num_available) == (3, 3)


@pytest.mark.parametrize("method", ["release", "drop", "share", "keep"])
def test_holding_or_giving_up_a_free_page_is_an_error(method):
    pool = PagePool(2)
    pool.release(pool.take(1))
    with pytest.raises(AssertionError, match="page 0"):
        getattr(pool, method)((0,))
    assert (pool.num_free, pool.num_available) == (2, 2)


def test_a_snapshot_cannot_give_up_what_a_sequence_holds_nor_the_reverse():
    pool = PagePool(2)
    used, kept = pool.take(2)
    pool.keep((kept,))
    pool.release((kept,))
    with pytest.raises(AssertionError, match="no snapshot keeps page 0"):
        pool.drop((used,))
    with pytest.raises(AssertionError, match="no sequence uses page 1"):
        pool.release((kept,))


def test_more_than_there_is_cannot_be_taken():
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 of 2 free pages"):
        pool.take(3)
    assert pool.num_free == 2

"""Snapshots are found by their keys, longest first, and go in the order of their last use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberbox.engine.pages import PagePool
from emberbox.engine.snapshots import PrefixKeys, Snapshot, SnapshotIndex

KEYS = tuple(range(1000, 1400))


def saved(index, keys, position, pages=()):
    snapshot = Snapshot(index.reserve(), PrefixKeys(keys).digest(position), position, pages)
    index.add(snapshot)
    return snapshot


@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40),
    lengths=st.lists(st.integers(0, 40), max_size=12),
    num_first=st.integers(0, 40),
)
def test_a_digest_depends_on_the_prefix_alone(keys, lengths, num_first):
    """Not on which others were asked for before, nor on when the keys came."""
    grown = PrefixKeys(keys[:num_first])
    lengths = [min(length, len(keys)) for length in lengths]
    for length in lengths:
        if length <= num_first:
            grown.digest(length)
    grown.extend(keys[num_first:])
    assert [grown.digest(n) for n in lengths] == [PrefixKeys(keys[:n]).digest(n) for n in lengths]


def test_digests_of_different_prefixes_differ():
    whole, other = PrefixKeys(KEYS), PrefixKeys((*KEYS[:9], -1, *KEYS[10:]))
    assert len({whole.digest(n) for n in range(50)}) == 50
    assert [whole.digest(n) == other.digest(n) for n in (8, 9, 10, 50)] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(AssertionError, match="401 of 400 keys"):
        whole.digest(401)


def test_the_longest_prefix_below_the_limit_is_found():
    index = SnapshotIndex(4, PagePool(1))
    short, long = saved(index, KEYS, 70), saved(index, KEYS, 100)
    saved(index, (*KEYS[:90], -5, *KEYS[91:]), 120)
    assert index.find(PrefixKeys(KEYS), 400) is long
    assert index.find(PrefixKeys(KEYS), 101) is long
    assert index.find(PrefixKeys(KEYS), 100) is short
    assert index.find(PrefixKeys(KEYS), 70) is None
    assert index.find(PrefixKeys(KEYS[1:]), 400) is None


def test_the_least_recently_used_gives_its_number_up():
    index = SnapshotIndex(3, PagePool(1))
    first, second, third = (saved(index, KEYS, n) for n in (70, 80, 90))
    assert [first.number, second.number, third.number] == [0, 1, 2]
    assert index.touch(first.digest)
    assert index.reserve() == 1
    assert not index.touch(second.digest)
    assert index.find(PrefixKeys(KEYS), 90) is first
    assert index.reserve() == 2
    assert index.reserve() == 0
    assert index.reserve() is None
    assert len(index) == 0


def test_a_reserved_number_can_be_given_back_once():
    index = SnapshotIndex(1, PagePool(1))
    number = index.reserve()
    assert index.find(PrefixKeys(KEYS), 400) is None
    index.cancel(number)
    with pytest.raises(AssertionError, match="snapshot 0 is free"):
        index.cancel(number)
    assert index.reserve() == number


def test_no_snapshots_at_all_is_possible():
    index = SnapshotIndex(0, PagePool(1))
    assert index.reserve() is None
    assert index.find(PrefixKeys(KEYS), 400) is None


def test_a_snapshot_keeps_its_pages_until_it_is_dropped():
    pool = PagePool(3)
    index = SnapshotIndex(2, pool)
    pages = pool.take(2)
    snapshot = saved(index, KEYS, 130, pages)
    pool.release(pages)
    assert pool.num_free == 1
    index.drop(snapshot)
    assert pool.num_free == 3
    index.drop(snapshot)  # it is no longer there: nothing happens
    assert pool.num_free == 3


def test_only_an_identical_snapshot_is_dropped():
    index = SnapshotIndex(1, PagePool(1))
    old = saved(index, KEYS, 70)
    index.drop(old)
    new = saved(index, KEYS, 70)
    index.drop(old)
    assert index.find(PrefixKeys(KEYS), 400) is new
    with pytest.raises(AssertionError, match="saved once"):
        index.add(Snapshot(0, new.digest, 70, ()))


def test_the_version_tells_when_another_answer_is_possible():
    index = SnapshotIndex(1, PagePool(1))
    versions = [index.version]
    snapshot = saved(index, KEYS, 70)
    versions.append(index.version)
    index.touch(snapshot.digest)
    assert index.version == versions[-1]
    index.reserve()
    versions.append(index.version)
    assert len(set(versions)) == 3


def filled_index():
    """Six pages: 0, 1 kept by two nested snapshots, 2 in use as well as kept, 3..5 kept by one."""
    pool = PagePool(6)
    index = SnapshotIndex(9, pool)
    pages = pool.take(6)
    tiny = saved(index, (-4, *KEYS), 30)
    in_use = saved(index, (-3, *KEYS), 64, pages[2:3])
    inner = saved(index, KEYS, 64, pages[:1])
    outer = saved(index, KEYS, 128, pages[:2])
    last = saved(index, (-2, *KEYS), 192, pages[3:])
    pool.release(pages[:2] + pages[3:])
    return pool, index, (tiny, in_use, inner, outer, last)


@pytest.mark.parametrize(
    ("wanted", "num_free", "gone"),
    [(0, 0, []), (1, 2, [2, 3]), (2, 2, [2, 3]), (3, 5, [2, 3, 4]), (6, 0, None)],
)
def test_room_is_made_from_the_oldest_that_free_something(wanted, num_free, gone):
    """The oldest two are spared: one has no page, the other's is in use. Six cannot be had."""
    pool, index, snapshots = filled_index()
    assert index.make_room(wanted) is (gone is not None)
    assert pool.num_free == num_free  # the inner one alone frees nothing: the outer has its page
    assert [i for i, s in enumerate(snapshots) if not index.touch(s.digest)] == (gone or [])


def test_clear_leaves_nothing():
    pool, index, _ = filled_index()
    index.clear()
    assert (len(index), pool.num_free, pool.num_available) == (0, 5, 5)
    assert index.find(PrefixKeys(KEYS), 400) is None
    assert sorted(index.reserve() for _ in range(9)) == list(range(9))

"""What the scheduler saves, finds, restores and gives up, by examples."""

from emberbox.engine.plan import Admitted, Result, Save
from tests.engine.paper_device import engine, positions, sizes, tokens


def test_chunks_end_at_snapshot_points_and_are_saved_there():
    it = engine(snapshot_every=100)
    request = it.submit(tokens(230), max_tokens=9, suffix=5)
    plans = [it.step() for _ in range(4)]
    assert [sizes(plan)[request] for plan in plans] == [100, 100, 25, 5]
    assert [plan.work[0].samples for plan in plans] == [False, False, False, True]
    assert [len(plan.saves) for plan in plans] == [1, 1, 1, 1]
    assert plans[0].saves == (Save(0, 0, plans[0].work[0].pages[1]),)
    assert positions(it) == [100, 200, 225, 230]
    plan = it.schedule()
    it.forward(plan)
    (save,) = it.commit(plan, {request: Result((7,), True)})
    assert positions(it) == [100, 200, 225, 230, 231]
    assert (save.slot, save.page) == (0, plan.work[0].pages[3])


def test_a_snapshot_at_a_page_boundary_copies_no_page():
    it = engine()
    it.submit(tokens(128), max_tokens=1)
    plan = it.step()
    assert [save.page for save in plan.saves] == [None]
    it.submit(tokens(140))
    plan = it.step()
    assert [restore.page for restore in plan.restores] == [None]
    assert plan.admitted[0].num_cached == 128


def test_short_prefixes_are_not_saved():
    it = engine(min_snapshot_tokens=64)
    it.submit(tokens(60), max_tokens=4, suffix=3)
    it.drain()
    assert positions(it) == []
    it.submit(tokens(60), max_tokens=5, suffix=3)
    it.drain()
    assert positions(it) == [64]


def test_without_snapshots_chunks_are_not_cut():
    it = engine(num_snapshots=0, snapshot_every=100)
    request = it.submit(tokens(230), suffix=5)
    assert sizes(it.step()) == {request: 230}


def test_a_prefix_is_restored_and_only_the_rest_is_computed():
    it = engine()
    it.submit(tokens(200), max_tokens=1, suffix=4)
    it.drain()
    again = it.submit(tokens(200), suffix=4)
    plan = it.step()
    assert plan.admitted == (Admitted(again, 196),)
    assert (plan.work[0].position, len(plan.work[0].token_ids)) == (196, 4)
    assert plan.restores[0].page == plan.work[0].pages[3]
    assert plan.work[0].pages[:3] == (0, 1, 2)
    counts = it.scheduler.counts()
    assert (counts.num_hits, counts.num_hit_tokens) == (1, 196)


def test_the_next_turn_goes_on_from_the_end_of_the_reply():
    it = engine()
    it.submit(tokens(100), max_tokens=30)
    it.drain(token=5)
    it.submit(tokens(100) + [5] * 30 + [8, 9])
    assert it.step().admitted[0].num_cached == 129  # the last token was never computed


def test_one_token_is_left_to_compute():
    it = engine()
    it.submit(tokens(100), max_tokens=1)
    it.drain()
    it.submit(tokens(100), max_tokens=1)
    assert it.step().admitted[0].num_cached == 0


def test_equal_tokens_with_another_picture_are_another_prefix():
    it = engine()
    for picture in (-1, -2, -1):
        keys = [*tokens(80), picture, *tokens(40)]
        it.submit([*tokens(80), 3, *tokens(40)], keys, max_tokens=2, suffix=2)
        it.drain()
    assert it.scheduler.counts().num_hits == 1


def test_a_prefix_that_is_there_is_touched_not_saved_twice():
    it = engine(num_snapshots=2)
    it.submit(tokens(100), max_tokens=1)
    it.drain()
    it.submit(tokens(100, first=500), max_tokens=1)
    it.drain()
    it.submit(tokens(100), max_tokens=1)
    assert it.step().saves == ()
    it.submit(tokens(90, first=900), max_tokens=1)
    it.drain()  # takes the place of the second, the least recently used one
    for first, num_cached in ((0, 100), (500, 0)):
        request = it.submit(tokens(110, first=first))
        assert it.step().admitted[0].num_cached == num_cached
        it.abort(request)


def test_two_alike_in_one_step_save_once():
    it = engine()
    it.submit(tokens(100))
    it.submit(tokens(100))
    assert len(it.step().saves) == 1


def test_a_snapshot_is_not_restored_in_the_step_that_makes_it():
    it = engine()
    it.submit(tokens(100))
    it.submit(tokens(150))
    assert [entry.num_cached for entry in it.step().admitted] == [0, 0]
    it.submit(tokens(140))
    assert [entry.num_cached for entry in it.step().admitted] == [100]


def test_periodic_snapshots_thin_out_to_powers_of_two_behind_the_newest_eight():
    it = engine(snapshot_every=64, num_snapshots=40, min_snapshot_tokens=64)
    it.submit(tokens(64 * 21 + 10), suffix=3)
    for _ in range(24):
        it.step()
    named = [64 * 21 + 7, 64 * 21 + 10]
    assert positions(it) == [64 * n for n in (1, 2, 4, 8, *range(14, 22))] + named


def test_a_preempted_sequence_goes_on_from_its_own_snapshot():
    it = engine(num_pages=4)
    first = it.submit(tokens(128), max_tokens=60)
    second = it.submit(tokens(100, first=1000), max_tokens=60)
    it.step()
    plan = it.step()
    assert plan.preempted == (second,)
    assert positions(it) == [100, 128]
    plan = it.step(finish={first})
    assert plan.admitted == ()
    plan = it.step()
    assert plan.admitted == (Admitted(second, 100),)
    assert (plan.work[0].token_ids, plan.work[0].samples) == ((1,), True)
    it.drain()


def test_the_pages_of_a_hit_are_no_longer_there_for_others():
    """Three pages are only kept: a hit needs them and one more, which is not there."""
    it = engine(num_pages=5)
    it.submit(tokens(192), max_tokens=1)
    it.drain()
    it.submit(tokens(100, first=1000))
    it.step()
    it.submit(tokens(200))
    plan = it.step()
    assert (plan.admitted, plan.preempted) == ((), ())
    assert positions(it) == [100, 192]


def test_a_hit_counts_its_shared_pages_once():
    """Four pages in use, one free: a request of four pages fits, as three of them are there."""
    it = engine(num_pages=5)
    it.submit(tokens(192), max_tokens=60)
    it.step()
    it.step()
    request = it.submit(tokens(200))
    plan = it.step()
    assert plan.admitted == (Admitted(request, 192),)
    assert it.scheduler.counts().pages_used == 5


def test_a_hit_makes_its_snapshot_the_last_to_go():
    it = engine(num_snapshots=3)
    for first in (0, 500):
        it.submit(tokens(100, first=first), max_tokens=1)
        it.drain()
    it.submit(tokens(110), max_tokens=1)
    it.drain()
    it.submit(tokens(90, first=900), max_tokens=1)
    it.drain()
    it.submit(tokens(105), max_tokens=1)
    assert it.step().admitted[0].num_cached == 100


def test_what_a_preempted_sequence_can_restore_is_looked_for_anew():
    """No snapshot comes or goes between, but its prompt's end is a proper prefix by now."""
    it = engine(num_pages=3, min_snapshot_tokens=70)
    it.submit(tokens(100, first=500), max_tokens=1, suffix=2)
    it.drain()
    older = it.submit(tokens(64), max_tokens=60)
    younger = it.submit(tokens(100, first=500), max_tokens=60, suffix=2)
    assert it.step().admitted[1] == Admitted(younger, 98)
    assert it.step(finish={older}).preempted == (younger,)
    assert it.step().admitted == (Admitted(younger, 100),)

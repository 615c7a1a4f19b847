"""The training loop on a CPU: it learns, a resumed run is the uninterrupted one, order is fixed."""

import json
from dataclasses import replace

import pytest
import torch

from tests.training.nano_runs import make_batch, tiny_config
from training.feed import InlineFeed, WorkerFeed, make_item
from training.optim import Optimiser, orthogonal
from training.parameters import ROUTER_BIAS_CENTRE, initial
from training.recipe import BUCKETS, RECIPE, Bucket, Recipe, Schedule
from training.state import load_progress, load_weights
from training.train import Plan, parse_arguments, train

CONFIG = tiny_config()
SMALL = (
    Bucket(length=96, share=0.6, rows=3, chain=3),
    Bucket(length=64, share=0.4, rows=2, image=(84, 56)),
)


def plan(out, **changes):
    settings = {"buckets": SMALL, "device": "cpu", "steps": 2, "total_steps": 4, "out": out}
    return Plan(**(settings | changes))


def run(plan):
    lines = []
    progress = train(plan, CONFIG, make_batch, lines.append)
    return progress, load_weights(plan.out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps without interruption."""
    return run(plan(tmp_path_factory.mktemp("whole"), steps=4))


def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(whole, tmp_path):
    run(plan(tmp_path))
    progress, weights = run(plan(tmp_path, is_resumed=True))
    expected_progress, expected = whole
    assert (progress.step, progress.micro_batches, progress.tokens) == (4, 8, progress.tokens)
    assert progress.tokens == expected_progress.tokens
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_resuming_without_the_optimiser_is_another_run(whole, tmp_path):
    run(plan(tmp_path))
    for file in tmp_path.glob("optimiser-*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="optimiser"):
        run(plan(tmp_path, is_resumed=True))
    _, weights = run(plan(tmp_path, is_resumed=True, has_fresh_optimiser=True))
    assert any(not torch.equal(weights[name], whole[1][name]) for name in weights)


def test_a_few_steps_lower_the_loss_and_keep_the_bias_in_its_band(tmp_path):
    settings = {
        "recipe": Recipe(micro_batches=1),
        "buckets": (Bucket(length=64, share=1.0, rows=4),),
        "total_steps": 100,
    }
    run(plan(tmp_path, steps=1, **settings))
    progress, weights = run(plan(tmp_path, steps=59, is_resumed=True, **settings))
    losses = [record["buckets"]["64"]["loss"] for record in progress.history]
    assert losses[0] > 6
    assert losses[-1] < losses[0] - 0.8
    biases = [value for name, value in weights.items() if "correction_bias" in name]
    for bias in biases:
        assert bias.mean() == pytest.approx(ROUTER_BIAS_CENTRE, abs=1e-4)
        assert 0 < bias.std() < 0.1


def test_repair_begins_a_stage_that_is_never_dense(whole, tmp_path):
    run(plan(tmp_path, steps=4))
    progress, _ = run(plan(tmp_path, is_resumed=True, repair=0.5, steps=1, total_steps=2))
    assert (progress.stage, progress.stage_step, progress.step) == (1, 1, 5)
    schedule = plan(tmp_path, repair=0.5).schedule
    assert not schedule.is_dense(0.0)
    assert schedule.rate(0.5, 1000) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="repair"):
        run(plan(tmp_path, is_resumed=True))


def test_another_seed_does_not_resume(tmp_path):
    run(plan(tmp_path, steps=1))
    with pytest.raises(ValueError, match="seed 0, not 1"):
        run(plan(tmp_path, is_resumed=True, seed=1))


def test_no_file_of_a_run_exceeds_16_megabytes(whole, tmp_path):
    run(plan(tmp_path, steps=1))
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < 16_000_000
    assert load_progress(tmp_path).step == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_hand_out_the_same_batches_in_the_same_order(num_workers):
    inline = InlineFeed(make_batch, SMALL, seed=7, first=5)
    feed = WorkerFeed(make_batch, SMALL, 7, 5, num_workers=num_workers)
    try:
        for _ in range(7):
            index, expected = inline.next()
            found_index, found = feed.next()
            assert found_index == index
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
    finally:
        feed.close()


def test_batches_depend_on_seed_and_number():
    first, again, other, later = (
        make_item(make_batch, SMALL[:1], seed, number)[1][0]
        for seed, number in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert (first == again).all()
    assert not (first == other).all()
    assert not (first == later).all()


def test_schedule_warms_up_stays_flat_and_ends_at_zero():
    schedule = Schedule()
    assert schedule.rate(0.0, 0) == pytest.approx(1 / 150)
    assert schedule.rate(0.39, 400) == 1.0
    assert schedule.rate(0.7, 900) == pytest.approx(0.5)
    assert schedule.rate(1.0, 2000) == 0.0
    assert [schedule.is_dense(p) for p in (0.0, 0.059, 0.061)] == [True, True, False]


def test_bad_gradient_is_counted_and_changes_nothing_but_moments():
    start = {name: t for name, t in initial(CONFIG, 0).items() if "layers.0." in name}
    optimiser = Optimiser(start, torch.device("cpu"), replace(RECIPE, adam_decay=0, muon_decay=0))
    optimiser.rate.fill_(1.0)
    optimiser.grad[3] = float("inf")
    optimiser.step()
    assert int(optimiser.num_bad) == 1
    assert all(torch.equal(optimiser.params[name], start[name]) for name in start)


def test_parameters_are_aligned_views_and_every_matrix_is_trained_once():
    optimiser = Optimiser(initial(CONFIG, 0), torch.device("cpu"), RECIPE)
    assert all(place.start % 64 == 0 for place in optimiser.places)
    covered = sum(stop - start for start, stop, _, _ in optimiser.matrices)
    matrices = sum(
        place.stop - place.start for place in optimiser.places if place.start >= optimiser.num_adam
    )
    assert covered == matrices
    assert all((stop - start) % (r * c) == 0 for start, stop, r, c in optimiser.matrices)


def test_orthogonal_gives_singular_values_near_one():
    values = torch.linalg.svdvals(orthogonal(torch.randn(2, 48, 96)).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_command_line_refuses_repair_of_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--out", str(tmp_path), "--repair", "0.5"])
    assert "--repair needs --resume" in capsys.readouterr().err


def test_bucket_shares_sum_to_one_and_rows_hold_the_micro_batch():
    assert sum(bucket.share for bucket in BUCKETS) == pytest.approx(1.0)
    assert {bucket.num_rows * bucket.length for bucket in BUCKETS} == {32768}


def test_history_is_plain_json(whole):
    assert json.loads(json.dumps(whole[0].history)) == whole[0].history
    assert whole[0].history[-1]["bad_steps"] == 0

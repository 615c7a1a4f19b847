"""tools/step_figures.py and its tables: figures of a decode step, by numbers worked out by hand."""

import json
import re

import pytest
import torch

from benchmarks.step_timeline import runner_of
from emberbox.model.config import Glm5NextConfig
from tests.helpers.nano import nano_network
from tests.helpers.released import released_config
from tests.helpers.step_receipts import (
    RECEIPTS,
    put,
    repository,
    run,
    speed,
    summary_of,
    timeline,
)
from tools import summarise
from tools.figures import Receipt, Small
from tools.step_figures import LAUNCHES, STEP_FIGURES, limit_ms, step_projection
from tools.step_tables import WHAT, what

BARS = {  # as asked for
    "decode_tok_s.c1.ctx1k": (120, 150),
    "decode_tok_s.c1.ctx128k.relative": (0.9, None),
    "decode_tok_s.c1.ctx256k.relative": (0.85, None),
    "step_ms.m4": (15, 12),
    "step_ms.m8": (24, 20),
    "decode_tok_s.c4.wall": (220, 280),
    "decode_tok_s.c8.wall": (300, 420),
    "fraction_of_limit.c1": (0.30, 0.38),
    "peak_bytes.ctx262144.c1": (92e9, None),
    "peak_bytes.ctx262144.c1.off_plan": (0.03, None),
    "small_ops_ms.c1": (2.0, 1.2),
    "kl_ratio.ember-nano.bfloat16": (1.5, None),
    "kl_ratio.ember-nano.bfloat16.last": (1.5, None),
    "kl_ratio.ember-nano.fp8": (3, None),
    "kl_ratio.ember-nano-base2.bfloat16": (1.5, None),
    "kl_ratio.ember-nano-base2.bfloat16.last": (1.5, None),
    "kl_ratio.ember-nano-base2.fp8": (3, None),
}


@pytest.fixture
def root(tmp_path):
    return repository(tmp_path)


def test_every_bar_that_was_asked_for_is_a_figure():
    assert {f.key: (f.bar, f.aim) for f in STEP_FIGURES if f.bar is not None} == BARS
    better = {f.key for f in STEP_FIGURES if f.bar is not None and f.more_is_better}
    assert better == {key for key in BARS if key.startswith(("decode_tok_s", "fraction"))}


def test_speeds_are_those_of_the_receipt(root):
    summary = summary_of(root)
    assert summary["decode_tok_s.c1.ctx1k"] == 142.9
    assert summary["decode_tok_s.c1.ctx128k"] == 133.3
    assert summary["decode_tok_s.c1.ctx128k.relative"] == 0.9333  # 7 / 7.5
    assert summary["decode_tok_s.c1.ctx256k.relative"] == 0.875
    assert (summary["decode_tok_s.c4.wall"], summary["decode_tok_s.c8.wall"]) == (240, 299)
    assert (summary["step_ms.m4"], summary["step_ms.m8"]) == (13, 24.5)
    assert (summary["step_ms.m4.ratio"], summary["step_ms.m8.ratio"]) == (1.857, 3.5)
    assert "step_ms.m1.ratio" not in summary


def test_the_limit_is_that_of_decoding(root):
    assert limit_ms() == pytest.approx(2.50, abs=0.001)
    assert limit_ms() == pytest.approx(1e3 * 16.33e9 / (25 * 132 * 1.98e9))
    assert summary_of(root)["fraction_of_limit.c1"] == 0.357  # 2.4992 / 7


def test_the_peak_is_held_against_the_plan(root):
    summary = summary_of(root)
    assert summary["peak_bytes.ctx262144.c1"] == 91e9
    assert summary["peak_bytes.ctx262144.c1.planned"] == 90e9  # the reserve is nobody's
    assert summary["peak_bytes.ctx262144.c1.off_plan"] == pytest.approx(1 / 91, rel=1e-3)


def test_small_ops_are_what_is_no_product_with_the_trellis(root):
    summary = summary_of(root)
    assert summary["small_ops_ms.c1"] == 1.5
    assert (summary["small_ops_ms.c1.traced_ms"], summary["small_ops_ms.c1.trellis_ms"]) == (7, 5.5)


def test_closeness_is_that_of_each_case_and_part(root):
    summary = summary_of(root)
    assert summary["kl_ratio.ember-nano.bfloat16"] == 1.2
    assert summary["kl_ratio.ember-nano.bfloat16.kl_plain_bf16"] == 0.001
    assert summary["kl_ratio.ember-nano.bfloat16.long"] == 1.1
    assert summary["kl_ratio.ember-nano.bfloat16.last"] == 1.55
    assert summary["kl_ratio.ember-nano.fp8"] == 2.4
    assert "kl_ratio.ember-nano-base2.fp8" not in summary


def test_the_projection_follows_from_the_step():
    found = step_projection(Receipt(timeline()), Small())
    rate = 16.33e9 / (5.5e-3 * 132 * 1.98e9)
    assert found["weights_per_clock_per_sm"] == pytest.approx(rate)
    assert found["decode_ms"] == pytest.approx(5.5 * 132 * 1.98 / (48 * 2.4))
    assert found["small_ops_ms"] == pytest.approx(1.5)
    assert found["gb240.bytes_ms"] == pytest.approx(30.4167, rel=1e-5)
    assert found["gb273.step_ms"] == pytest.approx(26.7399 + 1.5, rel=1e-5)
    assert found["gb273.tok_s"] == pytest.approx(1e3 / 28.2399, rel=1e-5)


def test_decoding_is_the_limit_where_it_takes_longer_than_the_bytes():
    slow = timeline()
    slow["kernels"][0]["own_us"] += 15e3
    found = step_projection(Receipt(slow), Small())
    assert found["decode_ms"] == pytest.approx(20.5 * 132 * 1.98 / (48 * 2.4))
    assert found["gb240.step_ms"] == pytest.approx(found["decode_ms"] + 7.0 - 20.5)


@pytest.mark.parametrize("name", RECEIPTS)
def test_a_receipt_that_is_not_there_gives_no_figure(root, monkeypatch, name):
    whole = summary_of(root)
    (root / summarise.FOLDER / name).unlink()
    own = {each.key for each in STEP_FIGURES if each.receipt == name} & whole.keys()
    left = summary_of(root)
    assert own
    assert not own & left.keys()
    kept = {each.key for each in STEP_FIGURES if each.receipt != name} & whole.keys()
    assert kept <= left.keys()
    assert run(monkeypatch, root) == 0
    assert run(monkeypatch, root, "--check") == 0


def test_a_run_that_a_receipt_does_not_have_is_a_bar_that_is_missed(root, monkeypatch, capsys):
    put(root, "speed.json", speed((1024, 131_072), (4,)))
    assert not {"decode_tok_s.c1.ctx256k", "decode_tok_s.c8.wall"} & summary_of(root).keys()
    assert run(monkeypatch, root) == 0
    said = capsys.readouterr().out
    assert "MISSED decode_tok_s.c1.ctx256k.relative: no such run, bar >= 0.85" in said
    assert "MISSED step_ms.m8: 24.5, bar <= 24, aim 20" in said
    assert "holds  step_ms.m4: 13, bar <= 15, aim 12" in said
    assert run(monkeypatch, root, "--check") == 0
    assert run(monkeypatch, root, "--check", "--bars") == 1


def test_launches_are_those_of_the_layers():
    text = Glm5NextConfig.from_dict(released_config()).text
    sparse, experts = sum(text.layer_is_sparse), sum(text.mlp_is_moe)
    layers = len(text.layer_is_sparse)
    once = {"close_streams": 1, "greedy": 1, "kda_decode": layers - sparse}
    for names, count in (
        (("spread_streams", "collapse_streams"), 2 * layers),
        (("multiply_small", "multiply_side_by_side", "multiply_gate_up"), layers),
        (("open_rows", "score", "choose", "absorb", "attend", "finish"), sparse),
        (("sort_and_rotate", "gate_up", "down"), experts),
    ):
        once |= dict.fromkeys(names, count)
    assert once == LAUNCHES
    assert LAUNCHES.keys() == WHAT.keys() - {"multiply_rows", "rotate", "activate"}  # not in it


def test_a_long_sequence_s_step_has_scores_and_a_small_cache():
    """`score` is launched where a row of the page table has more pools than are chosen."""
    network = nano_network()
    runner, work = runner_of(network, 100)
    assert runner.cache.latents.shape[1] == len(work.pages) == 3
    table = runner._inputs.of(runner.shapes[0])[1].table
    text = Glm5NextConfig.from_dict(released_config()).text
    assert table.shape == (1, 4096)
    assert table.shape[1] * (64 // text.index_kpool) > text.index_topk // text.index_kpool
    with torch.inference_mode():
        assert runner.run([work])[0].logits.shape == (1, network.config.text.vocab_size)


def test_the_page_shows_figures_kernels_and_the_projection(root, monkeypatch):
    run(monkeypatch, root)
    page = (root / summarise.STEP_PAGE).read_text("utf-8")
    assert "- `speed.json`: A GPU, commit " in page
    assert "; `emberbox measure speed --engine`\n" in page
    assert "| `step_ms.m4` | 13 | ms | <= 15 | 12 | holds | ratio 1.857 |" in page
    assert "| `decode_tok_s.c8.wall` | 299 | tokens/s | >= 300 | 420 | missed |  |" in page
    assert "| `peak_bytes.ctx262144.c1` | 91,000,000,000 | bytes | <= 92,000,000,000 |" in page
    assert "A step takes 6.900 ms, and 7.000 ms while it is traced, of which" in page
    assert "of which products with the trellis 5.500 ms and all else 1.500 ms" in page
    assert f"| `gate_up` | {WHAT['gate_up']} | yes | 42 | 2,500.0 |" in page
    assert f"| `absorb_1` | {WHAT['absorb']} |  | 2 | 1,000.0 | 500.00 | 15.4% |" in page
    assert "| `gb273.tok_s` | 35.41 |" in page
    assert "| `kl_ratio.ember-nano.bfloat16.last` | 1.55 | times | <= 1.5 |  | missed |" in page
    assert "step_timeline.png" not in between(page, "timeline")
    kernels = (root / summarise.PAGE).read_text("utf-8")
    assert kernels.count("No receipt is there yet.") == 2  # the step's projection is not its own


def test_the_drawing_is_named_where_it_is(root, monkeypatch):
    (root / summarise.FOLDER / "step_timeline.png").write_bytes(b"")
    run(monkeypatch, root)
    page = (root / summarise.STEP_PAGE).read_text("utf-8")
    assert "`receipts/h200/step_timeline.png`" in between(page, "timeline")


@pytest.mark.parametrize("name", ["speed.json", "speed_peak.json"])
def test_the_page_measures_as_the_receipts_were(name):
    command = json.loads((summarise.ROOT / summarise.FOLDER / name).read_text("utf-8"))["command"]
    page = (summarise.ROOT / summarise.STEP_PAGE).read_text("utf-8")
    blocks = page.partition("## Measure it yourself")[2]
    assert f"{command}\n" in re.sub(r" \\\n +", " ", blocks)


def between(page, name):
    return page.partition(f"<!-- {name}: drawn")[2].partition("<!-- end -->")[0]


def test_kernels_of_the_table_are_kernels_of_the_ops():
    sources = (summarise.ROOT / "src/emberbox/ops").rglob("*.cu")
    defined = "\n".join(path.read_text("utf-8") for path in sources)
    for name in WHAT:
        assert re.search(rf"\b{name}(_##ROWS)?\(", defined), name
    assert what("finish_8") == WHAT["finish"]
    assert what("vectorized_elementwise_kernel") == "of torch: copies, embedding, streams"

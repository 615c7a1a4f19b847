"""tools/summarise.py: figures from receipts and nothing else, by numbers worked out by hand."""

import json
import shutil
from contextlib import contextmanager

import pytest

from benchmarks import kernel_cases, kernels
from tools import summarise
from tools.figures import FIGURES, Figure, Small, experts_us, projection

BARS = {  # as asked for
    "moe_decode_us.k2.tokens1": (65, 50),
    "moe_decode_us.k2.tokens8": (310, 260),
    "moe_decode_us.k2.tokens8.per_expert": (7.3, None),
    "moe_decode_us.k3.tokens1": (75, 60),
    "weights_per_clock_per_sm.k2": (13, 17),
    "linear_us.4096x24576.k4.rows1..8": (40, 34),
    "linear_us.8192x4096.k4.rows1..8": (17, 14),
    "linear_us.16384x4096.k4.rows1..8": (29, 24),
    "moe_prefill_tflops.k2.tokens4096": (200, 400),
}
EXPERT_WEIGHTS = 3 * 4096 * 2048
EXPERT_BYTES = EXPERT_WEIGHTS // 4 + 3 * 2 * (4096 + 2048)
CODE = {"registers": 122, "shared_bytes": 33792, "local_bytes": 0, "loop_instructions": 1280,
        "loop_weights_per_lane": 256.0, "streamed_bytes_per_lane": 64}  # fmt: skip


@contextmanager
def no_launches():
    yield [(name, lambda: None) for name in ("sort_and_rotate", "gate_up", "down")]


@pytest.fixture(scope="module")
def cases():
    """Those of the benchmark itself; a clock in place of a GPU: 60 us, without a graph 210."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_cases, "DEVICE", "cpu")
        patch.setattr(kernel_cases, "random_weight", lambda *_: None)
        patch.setattr(kernel_cases, "random_bank", lambda *_: None)
        patch.setattr(kernel_cases, "decode", lambda *_: None)
        patch.setattr(kernel_cases, "recorded", no_launches)
        patch.setattr(kernel_cases, "launched", lambda *_: [200.0, 220.0, 210.0])
        patch.setattr(kernel_cases, "replayed", timed)
        few = [*kernel_cases.moe_cases(), *kernel_cases.linear_cases()]
        return [*few, *kernel_cases.prefill_cases()]


def timed(body, calls, between=lambda: None):
    for _ in range(3):
        between()
    return [70.0, 50.0, 60.0]


def receipt_of(cases, code=()):
    raw = {"cases": cases, "code": list(code)}
    device = {"name": "A GPU", "num_multiprocessors": 132}
    return {"commit": "c0ffee" * 7, "device": device, "dense_flop_per_second": 8e14,
            "raw_sha256": kernels.digest(raw), **raw}  # fmt: skip


def code_of(kernel, k, arch):
    return {"kernel": kernel, "k": k, "arch": arch, **CODE}


@pytest.fixture
def root(tmp_path, cases):
    """A repository with one receipt and the pages."""
    (tmp_path / "docs").mkdir()
    for page in (summarise.PAGE, summarise.STEP_PAGE):
        shutil.copy(summarise.ROOT / page, tmp_path / page)
    pairs = [("gate_up", "sm_90"), ("gate_up", "sm_121"), ("multiply_rows", "sm_90")]
    code = [code_of(name, k, arch) for name, arch in pairs for k in (2.0, 4.0)]
    kernels.write(receipt_of(cases, code), tmp_path / summarise.FOLDER / "kernels.json")
    return tmp_path


def summary_of(root):
    return summarise.summarise(summarise.read_receipts(root / summarise.FOLDER))


def edit(root, change):
    """Changes the cases of the receipt as one who writes it does: with its digest."""
    path = root / summarise.FOLDER / "kernels.json"
    content = json.loads(path.read_text("utf-8"))
    change(content["cases"])
    kernels.write(receipt_of(content["cases"], content["code"]), path)


def run(monkeypatch, root, *options):
    monkeypatch.setattr("sys.argv", ["summarise", "--root", str(root), *options])
    return summarise.main()


def test_every_bar_that_was_asked_for_is_a_figure():
    assert {f.key: (f.bar, f.aim) for f in FIGURES if f.bar is not None} == BARS
    assert len({figure.key for figure in FIGURES}) == len(FIGURES)


def test_the_benchmark_s_cases_give_every_figure(root):
    assert {figure.key for figure in FIGURES} <= set(summary_of(root))


def test_the_experts_of_a_token(root):
    summary = summary_of(root)
    assert summary["moe_decode_us.k2.tokens1"] == 60
    by_bytes = 8 * EXPERT_BYTES / 4.29e12 * 1e6
    assert summary["moe_decode_us.k2.tokens1.bytes_limit"] == pytest.approx(by_bytes, rel=1e-3)
    by_issue = 8 * EXPERT_WEIGHTS * 5 / (132 * 128 * 1.98e9) * 1e6  # 5 instructions per weight
    assert summary["moe_decode_us.k2.tokens1.decode_limit"] == pytest.approx(by_issue, rel=1e-3)


def test_experts_of_several_tokens_count_once_each(root):
    def change(cases):
        (case,) = (c for c in cases if (c["op"], c["k"], c["tokens"]) == ("moe_decode", 2, 8))
        case |= {"us": [300.0, 320.0, 310.0], "distinct": [40.0, 44.0, 45.0]}

    cases = json.loads((root / summarise.FOLDER / "kernels.json").read_text())["cases"]
    drawn = [c["distinct"] for c in cases if c["op"] == "moe_decode" and c["tokens"] == 8]
    assert all(38 < each < 46 for repeats in drawn for each in repeats)  # 64 (1 - (7/8)^8) = 42
    edit(root, lambda cases: change([c for c in cases if "tokens" in c]))
    summary = summary_of(root)
    assert summary["moe_decode_us.k2.tokens8"] == 310
    assert summary["moe_decode_us.k2.tokens8.per_expert"] == 7.273  # of 7.5, 7.273, 6.889
    assert summary["moe_decode_us.k2.tokens8.experts"] == 43


def test_a_range_of_rows_means_the_slowest(root):
    def change(cases):
        for case in cases:
            if case["op"] == "linear" and case["shape"] == [8192, 4096] and case["k"] == 4:
                case["us"] = [{1: 14.0, 2: 16.5, 4: 15.0, 8: 16.0, 16: 30.0}[case["rows"]]] * 3

    edit(root, change)
    assert summary_of(root)["linear_us.8192x4096.k4.rows1..8"] == 16.5


def test_a_row_count_that_was_not_measured_is_missed(root):
    edit(root, lambda cases: cases.remove(next(c for c in cases if c.get("rows") == 2)))
    with pytest.raises(SystemExit, match=r"rows \[2\]"):
        summary_of(root)


def test_weights_per_clock_are_those_of_both_kernels_and_of_the_slower_count(root):
    def change(cases):
        for case in (c for c in cases if c["op"] == "expert_kernel" and c["k"] == 2):
            case["distinct"] = [8.0 if case["tokens"] == 1 else 42.0] * 3
            case["us"] = [{"gate_up": 30.0, "down": 16.0}.get(case["kernel"], 9.0)] * 3
            if case["tokens"] == 8:
                case["us"] = [6 * us for us in case["us"]]

    edit(root, change)
    summary = summary_of(root)
    assert summary["weights_per_clock_per_sm.k2"] == pytest.approx(
        42 * EXPERT_WEIGHTS / (6 * 46e-6) / (132 * 1.98e9), rel=1e-3
    )
    assert summary["weights_per_clock_per_sm.k2.decode_limit"] == 25.6
    assert summary["weights_per_clock_per_sm.k2.bytes_limit"] == 65.66


def test_prefill_counts_two_operations_per_weight_and_routed_row(root):
    expected = 2 * EXPERT_WEIGHTS * 4096 * 8 / 60e-6 / 1e12
    assert summary_of(root)["moe_prefill_tflops.k2.tokens4096"] == pytest.approx(expected, rel=1e-3)

    def no_graph(cases):
        for case in (c for c in cases if c["op"] == "moe_prefill"):
            case |= {"us": None, "eager_us": [120.0] * 3}

    edit(root, no_graph)
    again = summary_of(root)["moe_prefill_tflops.k2.tokens4096"]
    assert again == pytest.approx(expected / 2, rel=1e-3)


def test_the_projection_follows_from_the_cubin_and_the_data_sheet(root):
    receipt = summarise.read_receipts(root / summarise.FOLDER)["kernels.json"]
    found = projection(receipt, Small(), 2.0)
    # 122 registers are given as 128: two blocks of 256 threads, two of 33 KB shared memory.
    assert found["resident_blocks_per_sm"] == 2
    assert found["bytes_in_flight_per_sm"] == 2 * 8 * 32 * 64
    assert found["bytes_in_flight_per_sm.needed"] == pytest.approx(273e9 * 0.8e-6 / 48)
    assert found["weights_per_clock_per_sm.needed"] == pytest.approx(9.479, rel=1e-3)
    weights = 8 * EXPERT_WEIGHTS
    assert found["weights_per_clock_per_sm"] == pytest.approx(weights / 120e-6 / 132 / 1.98e9)
    slower = min(found["weights_per_clock_per_sm"] * 48 * 2.4e9, 273e9 * 4)
    assert found["moe_decode_us.tokens1"] == pytest.approx(weights / slower * 1e6)
    assert projection(receipt, Small(), 3.0) == {}  # no cubin of this rate


def test_a_check_passes_once_the_files_are_written(root, monkeypatch, capsys):
    assert run(monkeypatch, root, "--check") == 1
    assert "docs/kernels.md" in capsys.readouterr().err
    assert not (root / summarise.FOLDER / "summary.json").exists()
    assert run(monkeypatch, root) == 0
    written = json.loads((root / summarise.FOLDER / "summary.json").read_text())
    assert written == summary_of(root)
    assert all(isinstance(value, float | int) for value in written.values())
    assert run(monkeypatch, root, "--check") == 0


@pytest.mark.parametrize("what", ["summary", "page", "case"])
def test_an_edited_figure_is_noticed(root, monkeypatch, what):
    run(monkeypatch, root)
    if what == "summary":
        path, old, new = (
            root / summarise.FOLDER / "summary.json",
            'tokens1": 60.0',
            'tokens1": 59.0',
        )
    elif what == "page":
        path, old, new = root / summarise.PAGE, "tokens1` | 60 |", "tokens1` | 59 |"
    else:
        path, old, new = root / summarise.FOLDER / "kernels.json", "50.0", "49.0"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")
    if what == "case":
        with pytest.raises(SystemExit, match="not those that its raw_sha256 is of"):
            run(monkeypatch, root, "--check")
    else:
        assert run(monkeypatch, root, "--check") == 1


def test_a_changed_receipt_makes_the_summary_old(root, monkeypatch):
    run(monkeypatch, root)
    edit(root, lambda cases: cases[0].update(us=[59.0] * 3))
    assert run(monkeypatch, root, "--check") == 1


def test_a_summary_without_receipts_is_noticed(root, monkeypatch):
    run(monkeypatch, root)
    (root / summarise.FOLDER / "kernels.json").unlink()
    assert run(monkeypatch, root, "--check") == 1
    assert run(monkeypatch, root) == 0
    assert not (root / summarise.FOLDER / "summary.json").exists()
    assert (root / summarise.PAGE).read_text("utf-8").count("No receipt is there yet.") == 2


@pytest.mark.parametrize(("value", "word"), [(65.0, "holds "), (65.01, "MISSED")])
def test_bars_are_said_and_may_be_demanded(root, monkeypatch, capsys, value, word):
    edit(root, lambda cases: cases[0].update(us=[value] * 3))
    run(monkeypatch, root)
    out = capsys.readouterr().out
    assert f"{word} moe_decode_us.k2.tokens1: {value:g}, bar <= 65, aim 50" in out
    assert "MISSED linear_us.4096x24576.k4.rows1..8: 60, bar <= 40, aim 34" in out
    assert run(monkeypatch, root, "--check") == 0
    assert run(monkeypatch, root, "--check", "--bars") == 1  # some bar is missed in any case


def test_bars_of_speeds_and_of_times_point_in_opposite_directions():
    time = Figure("a", experts_us(2, 1), "us", bar=10)
    speed = Figure("b", experts_us(2, 1), "weights", bar=10, more_is_better=True)
    assert [time.holds(v) for v in (9, 10, 11)] == [True, True, False]
    assert [speed.holds(v) for v in (9, 10, 11)] == [False, True, True]


def test_what_is_committed_follows_from_the_committed_receipts(monkeypatch):
    assert run(monkeypatch, summarise.ROOT, "--check") == 0


def test_a_receipt_is_stamped_only_by_the_sources_that_ran(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    here = {"commit": "f00d", "is_clean": True}
    monkeypatch.setattr(kernels, "about_run", lambda _: here)
    found = {"commit": "", "is_clean": False, "sources_sha256": kernels.sources_digest()}
    kernels.write({**found, "sources_sha256": "other"}, path)
    with pytest.raises(SystemExit, match="not those that ran"):
        kernels.stamp(path)
    kernels.write(found, path)
    kernels.stamp(path)
    assert json.loads(path.read_text()) == {**found, **here}
    with pytest.raises(SystemExit, match="names commit f00d already"):
        kernels.stamp(path)

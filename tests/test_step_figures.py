"""tools/step_figures.py and its tables: figures of a decode step, by numbers worked out by hand."""

import json
import re
import shutil

import pytest

from benchmarks.step_timeline import MODEL, summed
from emberbox.measure.speed import Run, SpeedOptions
from emberbox.measure.speed_receipt import SpeedFacts, build_speed_receipt
from tools import summarise
from tools.figures import Receipt, Small
from tools.step_figures import STEP_FIGURES, limit_ms, step_projection
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
LONG = (1024, 131_072, 262_144)
STEP_MS = {1: 7.0, 2: 8.0, 4: 13.0, 8: 24.5}
PEAK_SETTINGS = {"max_model_len": 262_144, "max_running": 1, "snapshot_bytes": 0,
                 "prefill_tokens": 4_096, "cache_dtype": "auto"}  # fmt: skip


def decode_run(context, m, ms):
    steps = (ms, ms + 1, ms - 1)
    return Run(kind="decode", context=context, step_tokens=m, num_requests=1, num_tokens=3,
               wall_ms=sum(steps), step_ms=steps)  # fmt: skip


def replies_run(count, tok_s):
    tokens = 400 * count
    return Run(kind="replies", context=128, step_tokens=1, num_requests=count,
               num_tokens=tokens, wall_ms=1e3 * tokens / tok_s, step_ms=(9.0, 9.0))  # fmt: skip


def speed(contexts=LONG, concurrency=(4, 8), name=MODEL, reply_tokens=400, settings=PEAK_SETTINGS):
    """A receipt by the product's own writer: 7, 7.5, 8 ms a token; 240 and 299 tokens a second."""
    facts = SpeedFacts(
        command="emberbox measure speed --engine -o out.json",
        model={"name": name},
        device={"name": "A GPU", "num_multiprocessors": 132},
        op_table={},
        settings=settings,
        plan={"weights": 88_000_000_000, "workspace": 2_000_000_000, "reserve": 1 << 30},
        peak_bytes=91_000_000_000,
    )
    options = SpeedOptions(contexts=contexts, concurrency=concurrency, reply_tokens=reply_tokens)
    runs = [decode_run(contexts[0], m, ms) for m, ms in STEP_MS.items()]
    runs += [decode_run(c, 1, {131_072: 7.5, 262_144: 8.0}[c]) for c in contexts[1:]]
    runs += [replies_run(n, {4: 240, 8: 299}[n]) for n in concurrency]
    return build_speed_receipt(facts, options, runs)


def timeline():
    """A step of 6.9 ms, in which three kernels multiply with the trellis for 5.5 ms."""
    kernels = [
        {"name": name, "end_us": at + us, "own_us": us}
        for name, at, us in (
            ("gate_up", 0.0, 2500.0),
            ("down", 2500.0, 1500.0),
            ("absorb_1", 4000.0, 900.0),
            ("multiply_side_by_side", 4900.0, 1500.0),
            ("absorb_1", 6400.0, 100.0),
        )
    ]
    results = {"step_ms": 6.9, "trellis_ms": 5.5, "small_ops_ms": 6.9 - 5.5, "num_kernels": 5}
    device = {"name": "A GPU", "num_multiprocessors": 132}
    return {"commit": "c0ffee" * 7, "device": device, "context": 1024, "step_ms": [7.0, 6.9, 6.8],
            "results": results, "by_kernel": summed(kernels), "kernels": kernels}  # fmt: skip


def quality():
    def ratio(kl, plain):
        return {"kl": kl, "kl_plain_bf16": plain, "ratio": kl / plain}

    name = "ember-nano"
    long = {"long": ratio(0.0022, 0.0020), "last": ratio(0.0031, 0.0020)}
    cases = [
        {"checkpoint": name, "latents": "bfloat16", "bar": 1.5, **ratio(0.0012, 0.0010), **long},
        {"checkpoint": name, "latents": "fp8", "bar": 3.0, **ratio(0.0024, 0.0010)},
    ]
    results = {f"{name}.{case['latents']}": case["ratio"] for case in cases}
    return {"commit": "", "device": {"name": "A GPU"}, "cases": cases, "results": results}


RECEIPTS = {"speed.json": speed, "speed_peak.json": lambda: speed((1024,), ()),
            "step_timeline.json": timeline, "decode_quality.json": quality}  # fmt: skip


@pytest.fixture
def root(tmp_path):
    """A repository with receipts of a decode step, and none of a kernel."""
    for page in (summarise.PAGE, summarise.STEP_PAGE):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(summarise.ROOT / page, tmp_path / page)
    (tmp_path / summarise.FOLDER).mkdir(parents=True)
    for name, make in RECEIPTS.items():
        put(tmp_path, name, make())
    return tmp_path


def put(root, name, content):
    (root / summarise.FOLDER / name).write_text(json.dumps(content))


def summary_of(root):
    return summarise.summarise(summarise.read_receipts(root / summarise.FOLDER))


def run(monkeypatch, root, *options):
    monkeypatch.setattr("sys.argv", ["summarise", "--root", str(root), *options])
    return summarise.main()


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
    assert summary["small_ops_ms.c1"] == 1.4
    assert (summary["small_ops_ms.c1.step_ms"], summary["small_ops_ms.c1.trellis_ms"]) == (6.9, 5.5)


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
    assert found["small_ops_ms"] == pytest.approx(1.4)
    assert found["gb240.bytes_ms"] == pytest.approx(30.4167, rel=1e-5)
    assert found["gb273.step_ms"] == pytest.approx(26.7399 + 1.4, rel=1e-5)
    assert found["gb273.tok_s"] == pytest.approx(1e3 / 28.1399, rel=1e-5)


def test_decoding_is_the_limit_where_it_takes_longer_than_the_bytes():
    slow = timeline()
    slow["kernels"][0]["own_us"] += 15e3
    found = step_projection(Receipt(slow), Small())
    assert found["decode_ms"] == pytest.approx(20.5 * 132 * 1.98 / (48 * 2.4))
    assert found["gb240.step_ms"] == pytest.approx(found["decode_ms"] + 6.9 - 20.5)


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


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("speed.json", speed(name="ember-nano"), "its model is 'ember-nano', expected 'glm-5.3"),
        ("speed.json", speed(reply_tokens=64), "reply_tokens is 64, expected 400"),
        ("speed.json", speed((2048,), ()), "its first context is 2048, expected 1024"),
        (
            "speed_peak.json",
            speed(settings={**PEAK_SETTINGS, "prefill_tokens": 512}),
            "prefill_tokens is 512, expected 4096",
        ),
    ],
)
def test_a_receipt_of_something_else_is_refused(root, name, content, said):
    put(root, name, content)
    with pytest.raises(SystemExit, match=re.escape(said)):
        summary_of(root)


def edited(make, *path, value):
    content = make()
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("speed.json", edited(speed, "results", "step_ms.m4", value=9.0), "sha256: the document"),
        ("speed_peak.json", edited(speed, "peak_bytes", value=1), "sha256: the document"),
        ("speed.json", edited(speed, "schema", value="other"), "not a receipt of speed"),
        (
            "step_timeline.json",
            edited(timeline, "results", "small_ops_ms", value=1.1),
            "small_ops_ms is 1.1, its own numbers give 1.4",
        ),
        (
            "step_timeline.json",
            edited(timeline, "by_kernel", 0, "us", value=1.0),
            "by_kernel is not what its kernels sum up to",
        ),
        ("step_timeline.json", edited(timeline, "kernels", 0, "own_us", value=1.0), "by_kernel"),
        ("step_timeline.json", edited(timeline, "step_ms", value=[6.0]), "step_ms is 6.9"),
        (
            "decode_quality.json",
            edited(quality, "cases", 0, "last", "ratio", value=1.2),
            "ratio is 1.2, its own numbers give 1.55",
        ),
        (
            "decode_quality.json",
            edited(quality, "results", "ember-nano.fp8", value=1.0),
            "ember-nano.fp8 is 1.0",
        ),
    ],
)
def test_an_edited_receipt_is_refused(root, name, content, said):
    put(root, name, content)
    with pytest.raises(SystemExit, match=re.escape(said)):
        summary_of(root)


def test_the_page_shows_figures_kernels_and_the_projection(root, monkeypatch):
    run(monkeypatch, root)
    page = (root / summarise.STEP_PAGE).read_text("utf-8")
    assert "- `speed.json`: A GPU, commit " in page
    assert "; `emberbox measure speed --engine`\n" in page
    assert "| `step_ms.m4` | 13 | ms | <= 15 | 12 | holds | ratio 1.857 |" in page
    assert "| `decode_tok_s.c8.wall` | 299 | tokens/s | >= 300 | 420 | missed |  |" in page
    assert "| `peak_bytes.ctx262144.c1` | 91,000,000,000 | bytes | <= 92,000,000,000 |" in page
    assert "A step takes 6.900 ms, of which products with the trellis 5.500 ms" in page
    assert f"| `gate_up` | {WHAT['gate_up']} | yes | 1 | 2,500.0 |" in page
    assert f"| `absorb_1` | {WHAT['absorb']} |  | 2 | 1,000.0 | 500.00 | 15.4% |" in page
    assert "| `gb273.tok_s` | 35.54 |" in page
    assert "| `kl_ratio.ember-nano.bfloat16.last` | 1.55 | times | <= 1.5 |  | missed |" in page
    assert "step_timeline.png" not in between(page, "timeline")
    kernels = (root / summarise.PAGE).read_text("utf-8")
    assert kernels.count("No receipt is there yet.") == 2  # the step's projection is not its own


def test_the_drawing_is_named_where_it_is(root, monkeypatch):
    (root / summarise.FOLDER / "step_timeline.png").write_bytes(b"")
    run(monkeypatch, root)
    page = (root / summarise.STEP_PAGE).read_text("utf-8")
    assert "`receipts/h200/step_timeline.png`" in between(page, "timeline")


def between(page, name):
    return page.partition(f"<!-- {name}: drawn")[2].partition("<!-- end -->")[0]


def test_kernels_of_the_table_are_kernels_of_the_ops():
    sources = (summarise.ROOT / "src/emberbox/ops").rglob("*.cu")
    defined = "\n".join(path.read_text("utf-8") for path in sources)
    for name in WHAT:
        assert re.search(rf"\b{name}(_##ROWS)?\(", defined), name
    assert what("finish_8") == WHAT["finish"]
    assert what("vectorized_elementwise_kernel") == "of torch: copies, embedding, streams"

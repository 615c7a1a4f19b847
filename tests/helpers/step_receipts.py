"""Receipts of a decode step as their writers make them, with numbers that are easy to add up."""

import json
import shutil

from benchmarks.decode_quality import block_sizes, receipt_of, texts_of
from benchmarks.step_timeline import MODEL, summed
from emberbox.measure.receipt import seal_of
from emberbox.measure.speed import Run, SpeedOptions
from emberbox.measure.speed_receipt import SpeedFacts, build_speed_receipt
from tools import summarise
from tools.step_figures import LAUNCHES

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
    """A step of 6.9 ms, of 7 while it is traced, in which three kernels multiply with the trellis
    for 5.5 ms; the other launches take no time."""
    kernels = [
        {"name": name, "end_us": at + us, "own_us": us}
        for name, at, us in (
            ("gate_up", 0.0, 2500.0),
            ("down", 2500.0, 1500.0),
            ("absorb_1", 4000.0, 900.0),
            ("multiply_side_by_side", 4900.0, 1500.0),
            ("absorb_1", 6900.0, 100.0),
        )
    ]
    kernels += [launch(name) for name, n in LAUNCHES.items() for _ in range(n - (name in TIMED))]
    results = {"step_ms": 6.9, "traced_ms": 7.0, "trellis_ms": 5.5, "small_ops_ms": 1.5}
    device = {"name": "A GPU", "num_multiprocessors": 132}
    facts = {"commit": "c0ffee" * 7, "device": device, "context": 1024, "max_model_len": 262_144}
    return resealed({**facts, "step_ms": [7.0, 6.9, 6.8], "results": results,
                     "by_kernel": summed(kernels), "kernels": kernels})  # fmt: skip


TIMED = ("gate_up", "down", "multiply_side_by_side")


def launch(name):
    return {"name": name, "end_us": 7000.0, "own_us": 0.0}


def resealed(content):
    """As whoever changes a timeline and knows of its seal."""
    sha256 = seal_of({key: content[key] for key in ("step_ms", "kernels")})
    return {**content, "raw_sha256": sha256, "by_kernel": summed(content["kernels"])}


def quality():
    """Windows: 0.0012 of BF16, 0.0024 of FP8 latents, 0.0010 of plain BF16. The long text: 0.0022
    and 0.0020, of its last 1,024 tokens 0.0031 and 0.0020."""
    *windows, (long_id, long) = texts_of(32_768)
    texts = []
    for text_id, ids in windows:
        sizes = block_sizes(len(ids))
        means = {"plain_bf16": 0.0010, "bfloat16": 0.0012, "fp8": 0.0024}
        sums = {path: [mean * size for size in sizes] for path, mean in means.items()}
        texts.append({"id": text_id, "counts": sizes, **sums})
    early = (0.0022 * 64 - 0.0031 * 2) / 62
    long_sums = [512 * early] * 62 + [512 * 0.0030, 512 * 0.0032]
    counts = block_sizes(len(long))
    texts.append({"id": long_id, "counts": counts, "plain_bf16": [512 * 0.0020] * 64,
                  "bfloat16": long_sums})  # fmt: skip
    raw = [{"checkpoint": "ember-nano", "weights_sha256": "0" * 64, "texts": texts}]
    return {"commit": "", "device": {"name": "A GPU"}, **receipt_of(raw)}


def with_raw(change):
    """The receipt of closeness with other sums and the right seal, and figures as they were."""
    content = quality()
    change(content["raw"][0]["texts"])
    return {**content, "raw_sha256": seal_of({"raw": content["raw"]})}


def without(name, keep=0):
    """A timeline in which a kernel is launched `keep` times."""
    content = timeline()
    own = [kernel for kernel in content["kernels"] if kernel["name"] == name]
    left = [k for k in content["kernels"] if k["name"] != name] + own[:keep]
    return resealed({**content, "kernels": left})


def edited(make, *path, value):
    content = make()
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return content


RECEIPTS = {"speed.json": speed, "speed_peak.json": lambda: speed((1024,), ()),
            "step_timeline.json": timeline, "decode_quality.json": quality}  # fmt: skip


def repository(path):
    """A repository at `path` with receipts of a decode step, and none of a kernel."""
    for page in (summarise.PAGE, summarise.STEP_PAGE):
        (path / page).parent.mkdir(exist_ok=True)
        shutil.copy(summarise.ROOT / page, path / page)
    (path / summarise.FOLDER).mkdir(parents=True)
    for name, make in RECEIPTS.items():
        put(path, name, make())
    return path


def put(root, name, content):
    (root / summarise.FOLDER / name).write_text(json.dumps(content))


def summary_of(root):
    return summarise.summarise(summarise.read_receipts(root / summarise.FOLDER))


def run(monkeypatch, root, *options):
    monkeypatch.setattr("sys.argv", ["summarise", "--root", str(root), *options])
    return summarise.main()

"""benchmarks/decode_quality.py: sums that are stored, means that follow, and a run on a CPU."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import decode_quality
from benchmarks.decode_quality import (
    block_sizes,
    cases_of,
    decoded,
    kl_of,
    network_of,
    plain,
    receipt_of,
    sums_of,
    texts_of,
)
from emberbox.measure.panel import load_panel
from emberbox.measure.receipt import seal_of
from tests.helpers.nano import NANO

CPU = torch.device("cpu")


def text(name, counts, **sums):
    return {"id": name, "counts": counts, **sums}


def test_means_are_those_of_a_calculation_by_hand():
    windows = [
        text("a", [88, 512], plain_bf16=[1.0, 2.0], bfloat16=[2.0, 3.0], fp8=[4.0, 8.0]),
        text("b", [400], plain_bf16=[1.0], bfloat16=[1.0], fp8=[1.0]),
    ]
    long = text(
        "long", [1, 512, 512, 512], plain_bf16=[9.0, 1.0, 2.0, 4.0], bfloat16=[5.0, 1.0, 1.0, 2.0]
    )
    raw = [{"checkpoint": "nano", "texts": [*windows, long]}]
    first, second = cases_of(raw)
    assert first == {
        "checkpoint": "nano",
        "latents": "bfloat16",
        "bar": 1.5,
        "kl": 0.006,  # 6 in 1,000 tokens, not the mean of two means
        "kl_plain_bf16": 0.004,
        "ratio": 1.5,
        "long": {"kl": 9 / 1537, "kl_plain_bf16": 16 / 1537, "ratio": (9 / 1537) / (16 / 1537)},
        "last": {"kl": 3 / 1024, "kl_plain_bf16": 6 / 1024, "ratio": 0.5},
    }
    assert second == {
        "checkpoint": "nano",
        "latents": "fp8",
        "bar": 3.0,
        "kl": 0.013,
        "kl_plain_bf16": 0.004,
        "ratio": 3.25,
    }
    receipt = receipt_of(raw)
    assert receipt["results"] == {"nano.bfloat16": 1.5, "nano.fp8": 3.25}
    assert receipt["raw_sha256"] == seal_of({"raw": raw})
    windows[1]["fp8"] = []
    with pytest.raises(ValueError, match="b, fp8: not a sum for each block"):
        cases_of(raw)


@pytest.mark.parametrize(
    ("num", "sizes"), [(1, [1]), (512, [512]), (513, [1, 512]), (1535, [511, 512, 512])]
)
def test_blocks_are_counted_from_the_end(num, sizes):
    assert block_sizes(num) == sizes


def test_sums_are_those_of_each_block():
    kl = torch.arange(7, dtype=torch.float64)
    assert sums_of(kl, [1, 2, 4]) == [0, 3, 18]


def test_kl_is_from_the_truth():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    truth = [torch.tensor([p, q]).log() + 3]
    (kl,) = kl_of(truth, iter([torch.tensor([q, q]).log()]))
    assert kl.tolist() == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0], abs=1e-7)


def test_texts_are_windows_of_the_panel_and_all_of_them():
    *windows, (name, long) = texts_of(70_001)
    panel = {window.id: list(window.token_ids) for window in load_panel("nano-25").windows}
    assert 3 < len(windows) < 25
    assert all(panel[window_id] == ids for window_id, ids in windows)
    joined = [token for ids in panel.values() for token in ids]
    assert (name, len(long)) == ("long", 70_001)
    assert all(token == joined[i % len(joined)] for i, token in enumerate(long))


def test_a_step_s_logits_stand_at_their_tokens(monkeypatch):
    """In float32 both ways are one network: a row beside its own would be far away."""
    monkeypatch.setattr(decode_quality, "CHUNK", 16)
    (_, ids), *_ = texts_of(8)
    texts = [ids[:21], ids[30:67]]
    with torch.inference_mode():
        truth = [*plain(network_of(NANO, torch.float32, CPU, is_plain=True), texts)]
        network = network_of(NANO, torch.float32, CPU, is_plain=False)
        for kl, own in zip(kl_of(truth, decoded(network, texts, None)), texts, strict=True):
            assert kl.shape == (len(own),)
            assert float(kl.abs().max()) < 1e-6


def test_it_runs_on_a_cpu(monkeypatch, tmp_path):
    (name, ids), *_ = texts_of(8)
    texts = [(name, ids[:21]), ("long", ids[:40])]
    for key, value in {"CHUNK": 16, "LAST": 32, "CHECKPOINTS": ("ember-nano",)}.items():
        monkeypatch.setattr(decode_quality, key, value)
    monkeypatch.setattr(decode_quality, "texts_of", lambda _: texts)
    path = tmp_path / "quality.json"
    monkeypatch.setattr("sys.argv", ["quality", "--device", "cpu", "--out", str(path)])
    decode_quality.main()
    content = json.loads(Path(path).read_text("utf-8"))
    short, long = content["raw"][0]["texts"]
    assert (short["id"], short["counts"]) == (name, [5, 16])
    assert (long["id"], long["counts"]) == ("long", [8, 16, 16])
    assert short.keys() == {"id", "counts", "plain_bf16", "bfloat16", "fp8"}
    assert long.keys() == short.keys() - {"fp8"}
    for each in (short, long):
        for key in each.keys() - {"id", "counts"}:
            means = [s / n for s, n in zip(each[key], each["counts"], strict=True)]
            assert all(1e-6 < mean < 0.05 for mean in means), key  # of rounding, and no more
    assert len({tuple(short[key]) for key in ("plain_bf16", "bfloat16", "fp8")}) == 3
    assert {key: content[key] for key in ("raw", "raw_sha256", "cases", "results")} == receipt_of(
        content["raw"]
    )
    assert content["panel_sha256"] == load_panel("nano-25").sha256

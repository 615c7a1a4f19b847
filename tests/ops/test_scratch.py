"""Working memory of kernels: it grows before a graph is captured, and never meanwhile."""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops import scratch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_held(monkeypatch):
    monkeypatch.setattr(scratch, "_pieces", {})
    monkeypatch.setattr(scratch, "_captured", {})
    monkeypatch.setattr(scratch, "LEAST", 4)


def test_a_piece_is_shared_until_more_is_asked_for():
    first = scratch.scratch("rows", 10, torch.float16, CPU)
    assert scratch.scratch("rows", 7, torch.float16, CPU) is first
    assert scratch.scratch("rows", 10, torch.float32, CPU) is not first
    grown = scratch.scratch("rows", 11, torch.float16, CPU)
    assert grown.numel() == 11


def test_what_was_outgrown_is_let_go():
    for size in (10, 20, 40):
        scratch.scratch("rows", size, torch.float16, CPU)
    assert [piece.numel() for piece in scratch._pieces.values()] == [40]
    assert scratch._captured == {}


def test_counters_are_zero_and_small_ones_are_rounded_up():
    counters = scratch.counters(3, CPU)
    assert counters.tolist() == [0, 0, 0, 0]
    assert counters.dtype == torch.int32


class Device:
    """Looks like a CUDA device to the code that asks; memory comes from the CPU."""

    type = "cuda"


def test_nothing_grows_while_a_graph_is_captured(monkeypatch):
    device = Device()
    piece = type("Piece", (), {"numel": lambda _: 8, "data_ptr": lambda _: 77})()
    scratch._pieces[("rows", torch.float16, device)] = piece
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert scratch.scratch("rows", 8, torch.float16, device) is piece
    assert scratch._captured == {77: piece}  # kept for the graph, whatever comes later
    with pytest.raises(OpError, match=r"'rows': 9 numbers .* captured"):
        scratch.scratch("rows", 9, torch.float16, device)
    with pytest.raises(OpError, match="'counters'"):
        scratch.counters(1, device)

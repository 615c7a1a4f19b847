"""benchmarks/kernels.py without a GPU: the real launchers run up to the launch, at small sizes."""

from collections import Counter

import pytest
import torch

from benchmarks import kernel_cases, kernel_timing, kernels
from emberbox.ops.launch import Program
from emberbox.ops.linear_exl3 import kernel_cuda as linear
from emberbox.ops.moe_experts import decode_cuda, prefill_cuda

SMALL = {
    "DEVICE": torch.device("cpu"),
    "HIDDEN": 256,
    "WIDTH": 128,
    "EXPERTS": 12,
    "ALL_EXPERTS": 12,
    "BANKS": 2,
    "MOE_CALLS": 2,
    "MIN_CALLS": 3,
    "ROTATED_BYTES": 100_000,
    "LINEARS": ((256, 384), (1024, 1024)),
    "PREFILL_TOKENS": (40,),
}


@pytest.fixture
def launches(monkeypatch):
    """(file, macros, kernel, arguments) of every launch; nothing is launched."""
    found = []

    def note(program, name, grid, arguments, shared=0):
        found.append((program.path, program.macros, name, arguments))

    for name, value in SMALL.items():
        monkeypatch.setattr(kernel_cases, name, value)
    monkeypatch.setattr(kernel_timing, "DEVICE", SMALL["DEVICE"])
    monkeypatch.setattr(kernel_cases, "replayed", each_call)
    monkeypatch.setattr(kernel_cases, "launched", each_call)
    monkeypatch.setattr(Program, "launch", note)
    monkeypatch.setattr(Program, "load", lambda *_: None)
    for module in (linear, prefill_cuda):
        monkeypatch.setattr(module, "arch_of", lambda _: "sm_90")
    for module in (linear, decode_cuda):
        monkeypatch.setattr(module, "num_multiprocessors", lambda _: 132)
    return found


def each_call(body, calls, between=lambda: None):
    between()
    for i in range(calls):
        body(i)
    return [1.0]


def test_what_is_compiled_first_is_what_is_launched(launches):
    for cases in (kernel_cases.moe_cases, kernel_cases.linear_cases, kernel_cases.prefill_cases):
        assert len(list(cases())) > 0
    used = {(path, macros) for path, macros, *_ in launches}
    assert used == {
        (path, macros) for path, macros, arch in kernels.builds("sm_90") if arch == "sm_90"
    }
    assert {name for name, _ in kernels.LOOPS} < {name for _, _, name, _ in launches}


def test_each_kernel_of_the_experts_is_timed_alone(launches):
    banks = [kernel_timing.random_bank(12, 256, 128, 2) for _ in range(2)]
    seen = []
    for case in kernel_cases._expert_kernels(banks, 1, {}):
        seen.append((case["kernel"], Counter(name for _, _, name, _ in launches)))
        launches.clear()
    # Two calls of the case, and the step before them that leaves the routing behind.
    assert [kernel for kernel, _ in seen] == ["sort_and_rotate", "gate_up", "down"]
    for kernel, counts in seen[1:]:
        assert counts == {"sort_and_rotate": 1, "gate_up": 1, "down": 1, kernel: 3}
    assert all(case["distinct"] == [8.0] for case in kernel_cases._expert_kernels(banks, 1, {}))
    launches.clear()
    *_, _ = kernel_cases._expert_kernels(banks, 1, {})
    tables = [arguments[0] for _, _, name, arguments in launches if name == "down"]
    assert {table.data_ptr() for table in tables[-2:]} == {b.matrices.data_ptr() for b in banks}


def test_calls_take_the_experts_of_banks_in_turn(launches):
    banks = [kernel_timing.random_bank(12, 256, 128, 2) for _ in range(2)]
    kernel_cases._moe(banks, 1)
    tables = [arguments[0].data_ptr() for _, _, name, arguments in launches if name == "gate_up"]
    assert tables == [bank.matrices.data_ptr() for bank in banks]


def test_calls_take_weights_that_fill_the_cache_together(launches):
    for case in kernel_cases.linear_cases():
        assert case["buffers"] * case["weight_bytes"] >= SMALL["ROTATED_BYTES"]
        assert case["buffers"] >= 2
        assert case["calls"] % case["buffers"] == 0
        assert case["calls"] >= SMALL["MIN_CALLS"]


def test_distinct_experts_are_counted_per_call():
    logits = torch.zeros(2, 3, 9)
    logits[0, :, :2] = 1  # all tokens the same two
    logits[1, 0, :2] = logits[1, 1, 2:4] = logits[1, 2, 3:5] = 1  # 0 1, 2 3, 3 4
    assert kernel_timing.num_distinct(logits, 2) == (2 + 5) / 2


def test_bytes_of_a_weight_are_its_words_and_scales():
    weight_parts = kernel_timing.weight_bytes(256, 384, 2.5)
    assert weight_parts == 256 * 384 * 5 // 16 + 2 * (256 + 384)

"""The most memory that was taken, by what was free before and when it was least.

There is no GPU here: what the driver would say is put in its place. That is the only thing that is.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emberbox.measure import speed_memory
from emberbox.measure.speed_memory import MemoryWatch, parse_free

GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
TOTAL = 140 * GIB


@pytest.fixture
def gpu(monkeypatch):
    """gpu(before, free): the driver's answers; free is used up, a number for each question."""

    def stand_in(before, free):
        answers = iter(free)
        monkeypatch.setattr(speed_memory, "_free_by_uuid", lambda: dict(before))
        monkeypatch.setattr(
            torch.cuda,
            "mem_get_info",
            lambda device: (next(answers) if device == CUDA else -1, TOTAL),
        )
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(uuid="bb-2" if device == CUDA else "aa-1"),
        )

    return stand_in


@pytest.mark.parametrize(
    ("free", "taken"),
    [
        ((90, 61, 80, 75), 39),  # at the second look
        ((90, 80, 70, 33), 67),  # at the end
        ((41, 80, 70, 90), 59),  # at the first
        ((90, 80, 0, 90), 100),
    ],
)
def test_what_was_taken_is_what_was_free_before_less_the_least(gpu, free, taken):
    gpu({"GPU-aa-1": 7 * GIB, "GPU-bb-2": 100 * GIB}, [each * GIB + 5 for each in free])
    watch = MemoryWatch()
    for _ in free[:-1]:
        watch.look(CUDA)
    assert watch.peak_bytes(CUDA) == taken * GIB - 5


def test_it_is_the_gpu_of_that_number(gpu):
    gpu({"GPU-bb-2": 50 * GIB, "GPU-aa-1": 100 * GIB}, [20 * GIB])
    assert MemoryWatch().peak_bytes(CUDA) == 30 * GIB


@pytest.mark.parametrize("before", [{}, {"GPU-aa-1": 7 * GIB}, {"bb-2": 7 * GIB}])
def test_a_gpu_that_was_not_seen_before_counts_all_that_is_not_free(gpu, before):
    gpu(before, [90 * GIB, 80 * GIB, *[85 * GIB] * 2])
    watch = MemoryWatch()
    watch.look(CUDA)
    watch.look(CUDA)
    assert watch.peak_bytes(CUDA) == TOTAL - 80 * GIB


def test_what_is_free_before_is_asked_at_the_beginning(gpu):
    gpu({"GPU-bb-2": 100 * GIB}, [60 * GIB])
    watch = MemoryWatch()
    gpu({"GPU-bb-2": 64 * GIB}, [60 * GIB])
    assert watch.peak_bytes(CUDA) == 40 * GIB


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own figure is Linux's")
def test_on_a_cpu_it_is_the_largest_resident_size(gpu):
    gpu({}, [])  # no question is asked of a GPU
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    largest = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    watch = MemoryWatch()
    watch.look(CPU)
    # More where the process that started this one was larger: the kernel counts it too.
    assert 0.95 * largest < watch.peak_bytes(CPU) < 100 * largest


@pytest.mark.parametrize(("platform", "peak"), [("linux", 3 * 1024), ("darwin", 3)])
def test_a_resident_size_is_in_kib_but_on_a_mac(monkeypatch, platform, peak):
    resource = pytest.importorskip("resource", reason="Windows has none")
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3))
    monkeypatch.setattr(sys, "platform", platform)
    assert MemoryWatch().peak_bytes(CPU) == peak


def test_free_memory_is_read_in_mib_for_each_gpu():
    assert parse_free("GPU-aa-1, 143167\nGPU-bb, [N/A]\n\nGPU-cc, 5\n") == {
        "GPU-aa-1": 143167 * 1024**2,
        "GPU-cc": 5 * 1024**2,
    }


@pytest.mark.skipif(os.name != "posix", reason="the program is a shell script")
@pytest.mark.parametrize(
    ("script", "found"),
    [
        ('echo "GPU-aa, 12"', {"GPU-aa": 12 << 20}),
        ('echo "GPU-aa, 12"; exit 9', {}),
        ("echo 'No devices were found'", {}),
        (None, {}),
    ],
)
def test_the_tool_is_asked_where_it_is(tmp_path, monkeypatch, script, found):
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert MemoryWatch()._before == found

"""How much memory this host can still give: the kernel's word, and that of the control groups."""

import pytest

from emberbox import device
from emberbox.device import UNKNOWN_MEMORY_BYTES, Device, host_memory_bytes

KIB = 1024
MEMINFO = "MemTotal:       9000 kB\nMemFree:         100 kB\nMemAvailable:   8000 kB\n"


@pytest.fixture
def root(tmp_path):
    """A host with 8,000 KiB available and no control group."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(root, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def write_v2(root, group: str, limit: object, used: int, file_pages: int = 0) -> None:
    folder = f"sys/fs/cgroup/{group}"
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.current", used)
    write(root, f"{folder}/memory.stat", f"anon 5\ninactive_file {file_pages}\nslab 7")


def test_without_control_groups_it_is_what_the_kernel_calls_available(root):
    assert host_memory_bytes(root) == 8000 * KIB


def test_a_control_group_that_leaves_less_decides(root):
    write(root, "proc/self/cgroup", "0::/box/engine")
    write_v2(root, "box/engine", 5000 * KIB, 3000 * KIB)
    assert host_memory_bytes(root) == 2000 * KIB


def test_file_pages_count_as_free(root):
    write(root, "proc/self/cgroup", "0::/box")
    write_v2(root, "box", 5000 * KIB, 3000 * KIB, file_pages=500 * KIB)
    assert host_memory_bytes(root) == 2500 * KIB


def test_a_group_further_up_may_be_the_tighter_one(root):
    write(root, "proc/self/cgroup", "0::/box/engine")
    write_v2(root, "box/engine", "max", 3000 * KIB)
    write_v2(root, "box", 6000 * KIB, 5000 * KIB)
    assert host_memory_bytes(root) == 1000 * KIB


def test_a_group_without_a_limit_or_with_a_larger_one_changes_nothing(root):
    write(root, "proc/self/cgroup", "0::/box")
    write_v2(root, "box", "max", 3000 * KIB)
    assert host_memory_bytes(root) == 8000 * KIB
    write_v2(root, "box", 90000 * KIB, 3000 * KIB)
    assert host_memory_bytes(root) == 8000 * KIB


def test_inside_a_container_the_limit_stands_at_the_root(root):
    write(root, "proc/self/cgroup", "0::/docker/0123")
    write_v2(root, "", 4000 * KIB, 1000 * KIB)
    assert host_memory_bytes(root) == 3000 * KIB


def test_a_full_group_leaves_nothing(root):
    write(root, "proc/self/cgroup", "0::/")
    write_v2(root, "", 4000 * KIB, 4001 * KIB)
    assert host_memory_bytes(root) == 0


def test_control_groups_of_version_1_are_read_too(root):
    write(root, "proc/self/cgroup", "9:cpu:/other\n4:memory,hugetlb:/jobs/a\n0::/")
    folder = "sys/fs/cgroup/memory/jobs/a"
    write(root, f"{folder}/memory.limit_in_bytes", 3000 * KIB)
    write(root, f"{folder}/memory.usage_in_bytes", 2000 * KIB)
    write(root, f"{folder}/memory.stat", f"inactive_file 9\ntotal_inactive_file {100 * KIB}")
    assert host_memory_bytes(root) == 1100 * KIB
    write(root, f"{folder}/memory.limit_in_bytes", 9223372036854771712)  # none
    assert host_memory_bytes(root) == 8000 * KIB


def test_a_host_that_says_nothing_gives_half_of_its_memory_or_a_fixed_size(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "_physical_memory_bytes", lambda: 10 * KIB)
    assert host_memory_bytes(tmp_path) == 5 * KIB
    monkeypatch.setattr(device, "_physical_memory_bytes", lambda: 0)
    assert host_memory_bytes(tmp_path) == UNKNOWN_MEMORY_BYTES == 2 * 1024**3


def test_the_physical_memory_of_this_machine_is_its_total():
    cpu = Device.detect("cpu")
    assert device._physical_memory_bytes() == pytest.approx(cpu.total_memory_bytes, rel=0.05)
    assert 0 < host_memory_bytes() <= cpu.total_memory_bytes
    # Other programs take and give memory between the two questions.
    assert cpu.free_memory_bytes() == pytest.approx(host_memory_bytes(), rel=0.2)

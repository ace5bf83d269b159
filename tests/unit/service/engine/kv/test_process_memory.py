"""The memory limit is the least of the machine's and of every control group around the process."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

import pytest

from service.engine.kv.process_memory import available_memory, memory_limit, resident_bytes

MACHINE = {"proc/meminfo": "MemTotal:        2048 kB\nMemFree: 5 kB\n"}
GROUP = {"proc/self/cgroup": "1:cpu:/other\n0::/a/b\n"}
OLD = {"proc/self/cgroup": "4:hugetlb:/a\n3:cpu,memory:/a\n1:name=systemd:/a:b\n"}


def system(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MACHINE, 2048 * 1024),
        (MACHINE | GROUP, 2048 * 1024),
        (MACHINE | GROUP | {"sys/fs/cgroup/a/b/memory.max": "max\n"}, 2048 * 1024),
        (MACHINE | GROUP | {"sys/fs/cgroup/a/b/memory.max": "7000\n"}, 7000),
        (GROUP | {"sys/fs/cgroup/a/b/memory.max": "9000\n", "sys/fs/cgroup/a/memory.max": "8000\n"}, 8000),
        (GROUP | {"sys/fs/cgroup/a/b/memory.max": "9000\n", "sys/fs/cgroup/a/memory.high": "3000\n"}, 3000),
        (MACHINE | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "6000\n"}, 6000),
        (MACHINE | GROUP | {"sys/fs/cgroup/a/b/memory.max": "9999999999\n"}, 2048 * 1024),
        (MACHINE | OLD | {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "5000\n"}, 5000),
        (MACHINE | OLD | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "4000\n"}, 4000),
    ],
)
def test_memory_limit_is_the_least_that_applies(tmp_path: Path, files: Mapping[str, str], expected: int | None) -> None:
    assert memory_limit(system(tmp_path, files)) == expected


def test_available_memory_is_what_is_free_and_what_the_process_has_within_the_limit(tmp_path: Path) -> None:
    free = MACHINE | {"proc/meminfo": MACHINE["proc/meminfo"] + "MemAvailable: 1000 kB\n", "proc/self/statm": "9 5 1\n"}
    assert available_memory(system(tmp_path, free)) == 1000 * 1024 + 5 * mmap.PAGESIZE
    limited = free | GROUP | {"sys/fs/cgroup/a/memory.max": "7000\n"}
    assert available_memory(system(tmp_path, limited)) == 7000
    (tmp_path / "proc/meminfo").write_text(MACHINE["proc/meminfo"])
    assert available_memory(tmp_path) == 7000


def test_resident_bytes_grow_with_what_is_touched(tmp_path: Path) -> None:
    before = resident_bytes()
    touched = bytearray(b"1" * (64 << 20))
    assert resident_bytes() - before > len(touched) // 2
    assert resident_bytes(tmp_path) == 0

"""The memory plan against a real server's peak, with sizes at which K/V are most of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.scenarios.shapes import is_close, serve_as_planned
from model.spec.artifact import KVPrecision, Precision
from service.repository.memory_plan import expected_manifest
from tests.artifacts import tiny_artifact, tiny_config

MIB = 1 << 20
# 64 KiB of K/V a token.
WIDE: dict[str, Any] = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "head_dim": 256, "vocab_size": 600}


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        ("decoder-only", {"context": 512}),
        pytest.param("encoder-decoder", {"context": 64, "source_context": 512}, marks=pytest.mark.whole),
    ],
)
def test_a_servers_peak_is_within_a_tenth_of_its_plan(family: str, lengths: dict[str, int], tmp_path: Path) -> None:
    sizes = WIDE | lengths
    (tmp_path / "m").symlink_to(tiny_artifact(family, Precision.INT8, **sizes), target_is_directory=True)
    expected = expected_manifest(tiny_config(family, **sizes), Precision.INT8, KVPrecision.FP32)
    found = serve_as_planned(tmp_path / "m", expected, memory=448 * MIB, threads=1)
    assert found["kv_bytes"] > 150 * MIB, "what is compared is not the process alone"
    assert is_close(found), {name: f"{value / MIB:.0f} MiB" for name, value in found.items() if "bytes" in name}

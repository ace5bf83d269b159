"""Where a model of Hugging Face's cache is: by the variables of its libraries, and by commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.hf.hub import cache_folder, find_snapshot


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, Path("/a")),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, Path("/b/hub")),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/huggingface/hub")),
        ({}, Path.home() / ".cache" / "huggingface" / "hub"),
    ],
)
def test_cache_is_where_the_libraries_keep_it(environ: dict[str, str], expected: Path) -> None:
    assert cache_folder(environ) == expected


def test_snapshot_is_mains_or_the_only_one(tmp_path: Path) -> None:
    repository = tmp_path / "models--gpt2"
    assert find_snapshot("gpt2", tmp_path) is None
    (one := repository / "snapshots" / "aa").mkdir(parents=True)
    assert find_snapshot("gpt2", tmp_path) == one
    (repository / "snapshots" / "bb").mkdir()
    assert find_snapshot("gpt2", tmp_path) is None
    (repository / "refs").mkdir()
    for commit, expected in (("bb\n", repository / "snapshots" / "bb"), ("../..", None)):
        (repository / "refs" / "main").write_text(commit)
        assert find_snapshot("gpt2", tmp_path) == expected
    for name in ("../x", "a/b/c", ""):
        assert find_snapshot(name, tmp_path) is None

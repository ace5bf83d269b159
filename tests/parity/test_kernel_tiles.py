"""AMX's tile registers give the bits of vectors in products of bytes, and long chunks' attention bits of their own.

Both by a double of the registers, as a processor may have VNNI without AMX.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from export.panels import INT4_BLOCK
from model import kernels
from tests.environment import environment
from tests.faults.sanitized import build, sources_with_tiles
from tests.own_operators import NEEDS_KERNELS, AttentionCase, Float32, int4_linear, int8_linear, open_session

pytestmark = NEEDS_KERNELS

_CPU_INFO = Path("/proc/cpuinfo")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that multiply many rows by the double."""
    return build("tiles.so", ("-shared", "-O1"), sources_with_tiles(tmp_path_factory.mktemp("sources")))


def open_tiles(library: Path, model: onnx.ModelProto, threads: int = 2) -> ort.InferenceSession:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: library)
        return open_session(model, by_kernels=True, threads=threads)


def check(library: Path, model: onnx.ModelProto, x: Float32) -> None:
    """Beside the shipped kernels, and beside each row alone, which vectors always multiply."""
    shipped = open_session(model, by_kernels=True)
    by_tiles = open_tiles(library, model)
    (found,) = by_tiles.run(None, {"x": x})
    assert found.tobytes() == shipped.run(None, {"x": x})[0].tobytes()
    alone = [shipped.run(None, {"x": x[row : row + 1]})[0] for row in range(len(x))]
    assert found.tobytes() == np.concatenate(alone).tobytes()


def rows(rng: np.random.Generator, num_rows: int, inner: int) -> Float32:
    x = rng.standard_normal((num_rows, inner)).astype(np.float32)
    x[num_rows // 2, 0] = np.nan
    return x


@given(
    inner=st.integers(1, 300),
    outer=st.integers(1, 70),
    num_rows=st.integers(8, 80),
    positive=st.booleans(),
    biased=st.booleans(),
    gelu=st.booleans(),
    swiglu=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
# The largest sums.
@example(inner=1 << 16, outer=3, num_rows=17, positive=True, biased=False, gelu=False, swiglu=False, seed=0)
# Rows that threads share, and a rest that is too small for tiles.
@example(inner=140, outer=70, num_rows=295, positive=False, biased=True, gelu=False, swiglu=False, seed=0)
@example(inner=64, outer=128, num_rows=295, positive=False, biased=False, gelu=False, swiglu=True, seed=0)
# Results that vectors write between products, and gates of more rows than are kept at once.
@example(inner=1100, outer=70, num_rows=83, positive=False, biased=True, gelu=False, swiglu=False, seed=0)
@example(inner=520, outer=128, num_rows=1109, positive=False, biased=False, gelu=False, swiglu=True, seed=0)
@settings(deadline=None, max_examples=25)
def test_int8_products_by_tiles_have_the_bits_of_those_by_vectors(
    library: Path,
    inner: int,
    outer: int,
    num_rows: int,
    positive: bool,
    biased: bool,
    gelu: bool,
    swiglu: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    outer = -(-outer // 64) * 64 if swiglu else outer
    model = int8_linear(inner, outer, rng, positive=positive, biased=biased, gelu=gelu, swiglu=swiglu)
    check(library, model, rows(rng, num_rows, inner))


@given(
    num_blocks=st.integers(1, 9),
    outer=st.integers(1, 40),
    num_rows=st.integers(14, 90),
    biased=st.booleans(),
    gelu=st.booleans(),
    swiglu=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(num_blocks=3, outer=64, num_rows=295, biased=False, gelu=False, swiglu=True, seed=0)
@settings(deadline=None, max_examples=25)
def test_int4_products_by_tiles_have_the_bits_of_those_by_vectors(
    library: Path, num_blocks: int, outer: int, num_rows: int, biased: bool, gelu: bool, swiglu: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    outer = -(-outer // 32) * 32 if swiglu else outer
    codes = rng.integers(0, 16, (outer, num_blocks, INT4_BLOCK)).astype(np.uint8)
    scales = rng.uniform(-0.1, 0.1, (outer, num_blocks)).astype(np.float32)
    bias = rng.standard_normal(outer).astype(np.float32) if biased else None
    model = int4_linear(codes, scales, bias, gelu=gelu, swiglu=swiglu)
    check(library, model, rows(rng, num_rows, num_blocks * INT4_BLOCK))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"), [(4, 4, 32, True), (6, 2, 64, False), (3, 1, 96, True), (2, 1, 256, False)]
)
@pytest.mark.parametrize(("window", "int8"), [(-1, False), (40, False), (560, False), (-1, True), (150, True)])
@pytest.mark.sampled(4)
def test_attention_in_tiles_is_that_in_vectors_and_has_the_same_bits_in_any_long_chunks(
    library: Path, heads: int, kv_heads: int, dim: int, rotary: bool, window: int, int8: bool
) -> None:
    """K/V beyond a row's end, NaN here, have no effect."""
    attention = AttentionCase(heads, kv_heads, dim, rotary=rotary, window=window, int8=int8, positions=1100)
    by_tiles, one_thread = (open_tiles(library, attention.own_model, threads) for threads in (2, 1))
    # Over three blocks of keys, with ever larger scores; a window of 560 begins within one and ends in a later one.
    length, (packed,) = 1100, attention.new_tokens(1, 1100)
    packed *= np.linspace(0.5, 2.0, length, dtype=np.float32)[:, None]

    def run(session: ort.InferenceSession, *chunks: int) -> Float32:
        cache, parts, begin = attention.cache(1, 1200), [], 0
        for part in cache:
            part[:] = attention.nothing
        for chunk in chunks:
            y, *caches = attention.run(session, [packed[:, begin : begin + chunk]], cache, [begin + chunk - 1])
            cache, begin = (caches[0], caches[1]), begin + chunk
            parts.append(y)
        assert begin == length
        return np.concatenate(parts, axis=1)

    vectors = run(by_tiles, *[95] * 11, 55)
    tiles = run(by_tiles, 528, 572)
    # What meets a number of the int8 cache is rounded to two bfloat16.
    np.testing.assert_allclose(tiles, vectors, rtol=2e-5, atol=1e-4 if int8 else 2e-5)
    assert tiles.tobytes() != vectors.tobytes(), "tiles were used"
    for chunks in ((1100,), (96, 128, 700, 176), (511, 101, 488)):
        assert run(one_thread, *chunks).tobytes() == tiles.tobytes(), f"chunks of {chunks}"
    if kernels.has_tiles():
        assert run(attention.own, 528, 572).tobytes() == tiles.tobytes(), "the double adds as the processor"


@pytest.mark.parametrize("int8", [False, True])
def test_rows_in_tiles_have_the_bits_that_they_have_alone(library: Path, int8: bool) -> None:
    attention = AttentionCase(4, 2, 64, rotary=True, int8=int8, positions=1100)
    session = open_tiles(library, attention.own_model)
    new, cache, last = attention.new_tokens(3, 100), attention.cache(3, 1100), [1090, 560, 99]
    together = attention.run(session, new, cache, last)
    for row in range(3):
        rows = slice(row, row + 1)
        alone = attention.run(session, [new[0][rows]], (cache[0][rows], cache[1][rows]), last[rows])
        for ours, theirs in zip(together, alone, strict=True):
            assert ours[rows].tobytes() == theirs.tobytes()


def test_tiles_are_used_where_they_work_and_the_question_leaves_no_trace() -> None:
    """In a process of its own: the handler of SIGILL is that of before, and a second answer is the first."""
    if not _CPU_INFO.exists() or "amx_int8" not in _CPU_INFO.read_text():
        pytest.skip("the processor announces no AMX")
    code = (
        "import os, signal; from model import kernels; signal.signal(signal.SIGILL, lambda *_: print('caught')); "
        "print(kernels.has_tiles(), kernels.has_tiles()); os.kill(os.getpid(), signal.SIGILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    first, second, *caught = done.stdout.split()
    assert (first == second, caught) == (True, ["caught"]), done.stderr
    if first == "False":
        pytest.skip("AMX is announced and does not work here")

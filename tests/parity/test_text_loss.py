"""What quantization costs on a text is the checkpoint's bits per byte beside the graph's, and can fail an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from export import text_loss
from export.__main__ import EXIT_FAILED, EXIT_PROVEN, EXIT_REFUSED, main
from model import checkpoint, evaluate
from model.nn.transformer import DecoderOnly
from model.spec import artifact
from model.spec.artifact import PARITY, KVPrecision, Precision
from model.spec.tokenizer import Tokenizer
from tests.artifacts import tiny_artifact

TEXT = "def f(x):\n    return x\n" * 9


def test_bits_per_byte_of_a_float32_artifact_are_the_checkpoints() -> None:
    folder, texts = tiny_artifact("decoder-only"), [TEXT, "import this\n"]
    source = checkpoint.load(folder.parent / "checkpoint")
    assert isinstance(source.model, DecoderOnly)
    expected = evaluate.text_likelihood(source.model, Tokenizer.load(source.tokenizer), texts).bits_per_byte
    assert text_loss.bits_per_byte(folder, artifact.load(folder), texts) == pytest.approx(expected, abs=1e-5)
    for kv_precision in (KVPrecision.FP32, KVPrecision.INT8):
        low = tiny_artifact("decoder-only", Precision.INT4, kv_precision=kv_precision)
        assert text_loss.bits_per_byte(low, artifact.load(low), texts) != pytest.approx(expected, abs=1e-5)


def _export(tmp_path: Path, text: bytes, family: str = "decoder-only", *options: str) -> tuple[int, Path]:
    (tmp_path / "text").write_bytes(text)
    out = tmp_path / "artifact"
    arguments = [str(tiny_artifact(family).parent / "checkpoint"), "--out", str(out), "--precision", "int8", *options]
    return main([*arguments, "--text", str(tmp_path / "text")]), out


def test_an_export_reads_the_first_bytes_of_a_text_and_records_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_loss, "MAX_TEXT_BYTES", 11)
    code, out = _export(tmp_path, "aé".encode() * 99)
    assert code == EXIT_PROVEN
    found = json.loads((out / PARITY).read_text())["text"]
    assert found["num_bytes"] == 10  # whole characters
    assert found["exported"] == pytest.approx(found["pytorch"], rel=found["limit"])
    assert found["exported"] != found["pytorch"]


def test_an_export_that_loses_more_than_its_limit_on_the_text_fails_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(text_loss._MAX_EXCESS, Precision.INT8, -0.1)
    code, out = _export(tmp_path, TEXT.encode())
    assert (code, out.exists()) == (EXIT_FAILED, False)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == "failed"


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        (b"", ("decoder-only",), "text is empty"),
        ("é".encode("latin-1") * 9, ("decoder-only",), "can't decode byte"),
        (TEXT.encode(), ("encoder-decoder",), "this is an encoder-decoder"),
        (TEXT.encode(), ("decoder-only", "--precision", "fp32", "--kv-layout", "paged"), "graphs over slots"),
    ],
)
def test_a_text_that_cannot_be_scored_is_refused(
    text: bytes, options: tuple[str, ...], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = _export(tmp_path, text, *options)
    assert (code, out.exists()) == (EXIT_REFUSED, False)
    assert problem in json.loads(capsys.readouterr().out.splitlines()[-1])["problems"][0]

"""The client that draws: what it asks for, what it writes, and what it exits with."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from onward.v1 import generation_pb2 as pb
from service.commands import explain as explain_client
from service.config import ExplainConfig

requests: list[pb.ExplainRequest] = []


def explain(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[int, str, str]:
    answer = pb.ExplainResponse(prompt_tokens=["a"], target_tokens=["b"], decoder_tokens=["<bos>"])
    answer.attentions.add(kind=pb.ATTENTION_KIND_CROSS, layer=0, head=0, rows=1, columns=1, weights=[1.0])
    requests.clear()

    class Stub:
        def __init__(self, channel: Any) -> None:
            pass

        def Explain(self, request: Any, timeout: float | None, metadata: Any) -> pb.ExplainResponse:  # noqa: N802
            requests.append(request)
            return answer

    monkeypatch.setattr("onward.methods.GenerationServiceStub", Stub)
    out, err = io.StringIO(), io.StringIO()
    code = explain_client.explain(ExplainConfig(model="m", text="hello", **options), out, err)
    return code, out.getvalue(), err.getvalue()


def test_explain_requests_the_selection_and_writes_both_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, picture = tmp_path / "a.html", tmp_path / "a.svg"
    ended = explain(monkeypatch, html=page, svg=picture, layers=(1,), heads=(0, 2), target_text="x")
    assert ended == (0, f"{page}\n{picture}\n", "")
    assert requests == [pb.ExplainRequest(model="m", text="hello", target_text="x", layers=[1], heads=[0, 2])]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert picture.read_text(encoding="utf-8").startswith("<svg ")


def test_explain_leaves_the_output_to_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert explain(monkeypatch, html=tmp_path / "a.html")[0] == 0
    assert requests == [pb.ExplainRequest(model="m", text="hello")]
    assert list(tmp_path.iterdir()) == [tmp_path / "a.html"]


def test_explain_reports_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "absent" / "a.html"
    assert explain(monkeypatch, html=page) == (1, "", f"{page}: No such file or directory\n")

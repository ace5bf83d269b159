"""HTTP as an operator runs it: a process of its own over real artifacts, openai-python, and SIGTERM."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from openai import OpenAI

from onward import Client
from tests.artifacts import tiny_artifact
from tests.integration.test_server_real import serving


def test_a_served_artifact_answers_the_same_over_both_transports_and_exits_with_0(tmp_path: Path) -> None:
    for family in ("decoder-only", "encoder-decoder"):
        (tmp_path / family).symlink_to(tiny_artifact(family))
    with serving(tmp_path, "--http-port", "0") as served:
        found = re.search(r"HTTP on port (\d+)", served.line)
        assert found, served.line
        with (
            OpenAI(base_url=f"http://127.0.0.1:{found[1]}/v1", api_key="none") as http,
            Client(served.target) as grpc,
        ):
            for model in ("decoder-only", "encoder-decoder"):
                options = {"model": model, "max_tokens": 12, "seed": 3, "temperature": 1.0}
                wanted = grpc.generate("abc", **options)
                extra = {"return_token_ids": True}
                answer = http.completions.create(prompt="abc", extra_body=extra, **options)
                assert answer.choices[0].to_dict()["token_ids"] == list(wanted.outputs[0].token_ids)
                assert answer.choices[0].text == wanted.text
                streamed = http.completions.create(prompt="abc", stream=True, **options)
                assert "".join(chunk.choices[0].text for chunk in streamed) == wanted.text
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0

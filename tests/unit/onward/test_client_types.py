"""What mypy infers for a user's script, of the blocking and of the asyncio client."""

from __future__ import annotations

from pathlib import Path

from mypy import api

SCRIPT = """
from collections.abc import Coroutine, Sequence
from typing import Any, assert_type
from onward import AsyncClient, Chunk, Client, Generation
from onward.v1 import generation_pb2 as pb

with Client("a:1") as client:
    assert_type(client.generate("a", max_tokens=3).text, str)
    assert_type(client.score("a", "b"), pb.ScoreResponse)
    assert_type(client.detokenize([1]), str)
    assert_type([chunk for chunk in client.stream("a", n=2)], list[Chunk])
    client.load_model("m")
    client.generate("a", max_tokens="many")  # type: ignore[arg-type]
    client.generate("a", max_tokns=3)  # type: ignore[call-arg]
    client.explain("a", layers=0)  # type: ignore[arg-type]

async def main() -> None:
    async with AsyncClient("a:1") as client:
        assert_type((await client.generate("a", max_tokens=3)).text, str)
        await assert_type(client.generate("a"), Coroutine[Any, Any, Generation])
        assert_type(await client.score("a", "b"), pb.ScoreResponse)
        assert_type([chunk async for chunk in client.stream("a", n=2)], list[Chunk])
        client.generate("a").text  # type: ignore[attr-defined]
        await client.generate("a", max_tokns=3)  # type: ignore[call-arg]
"""


def test_both_clients_are_typed_arguments_and_answers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # Strict: an ignore without an error of its code is an error.
    out, err, status = api.run(["--strict", "--cache-dir", str(tmp_path), str(script)])
    assert (status, err) == (0, ""), out

"""A server process on the device: exports, proves, streams full batches, reloads under load, unloads, and stops."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from export.__main__ import main
from loadtest.serving import serving
from model import checkpoint
from model.spec.artifact import CUDA_PRECISIONS, TOKENIZER, Device, Precision
from onward import Client
from tests.artifacts import tiny_tokenizer
from tests.gpu.conftest import CARD, TINY
from tests.gpu.subjects import Oracle, Subject

NUM = 12
NEW = 24
CASES = [
    *(
        pytest.param((name, Device.CPU, Precision.FP32), id=f"{name}-cpu", marks=[pytest.mark.whole] * (name != "tiny"))
        for name in TINY
    ),
    *(
        pytest.param((name, Device.CUDA, each), id=f"{name}-cuda-{each}", marks=CARD)
        for name in TINY
        for each in CUDA_PRECISIONS
    ),
]


@pytest.mark.parametrize("subject", CASES, indirect=True)
def test_a_server_answers_in_batches_as_alone_reloads_under_load_and_stops(subject: Subject, tmp_path: Path) -> None:
    config = subject.config
    tokenizer = tiny_tokenizer(config.vocab_size, ends_with_eos=config.is_encoder_decoder).to_str()
    checkpoint.save(tmp_path / "checkpoint", subject.model, config, {TOKENIZER: tokenizer}, {})
    flags = ["--device", str(subject.device), "--precision", str(subject.precision)]
    assert main([str(tmp_path / "checkpoint"), "--out", str(tmp_path / "models" / "m"), *flags]) == 0
    prompts = [subject.prompt(1 + 5 * number, number) for number in range(NUM)]
    with (
        serving(tmp_path / "models", "--device", str(subject.device), "--max-batch-size", "8") as server,
        Client(server.target) as client,
        ThreadPoolExecutor(NUM) as pool,
    ):

        def answer(prompt: list[int]) -> list[int]:
            with client.stream(prompt, max_tokens=NEW, ignore_eos=True, temperature=0) as stream:
                return [token for chunk in stream for token in chunk.token_ids]

        assert client.model("m").device == str(subject.device)
        assert client.verify_parity("m").parity.passed
        alone = list(map(answer, prompts))
        assert list(map(answer, prompts)) == alone
        is_reloaded = Event()

        def keep_asking(prompt: list[int]) -> list[list[int]]:
            """From before the reload until after it: all rows are busy while it goes on."""
            answers = [answer(prompt)]
            while not is_reloaded.is_set():
                answers.append(answer(prompt))
            return [*answers, answer(prompt)]

        asking = [pool.submit(keep_asking, prompt) for prompt in prompts]
        client.reload_model("m")
        is_reloaded.set()
        answers = [future.result() for future in asking]
        client.unload_model("m")
        client.load_model("m")
        assert answer(prompts[0]) == alone[0]
    assert {len(each) for several in answers for each in several} == {NEW}
    oracle = Oracle(subject.torch_model())
    for prompt, mine, several in zip(prompts, alone, answers, strict=True):
        for theirs in several:
            assert mine == theirs or oracle.is_tie(prompt, mine, theirs, subject.tolerance)

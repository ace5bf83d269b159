"""What the host costs in a step: seconds that the graph stands still between two runs, beside the seconds that it runs.

    python -m benchmarks.host ARTEFACT [--batches 1,8,32] [--prompt 128] [--new 64] [--threads N]

The engine alone, no transport: so many greedy requests, all there before the first step. Counted
are steps in which every request decodes; figures are medians (`StepStats`). Decoder-only artifacts. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from model.spec.artifact import TOKENIZER, Manifest, load
from model.spec.tokenizer import Tokenizer
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import SessionOptions
from service.engine.types import GenerationRequest, SamplingParams, StoppingParams


def main(arguments: Sequence[str]) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path, metavar="ARTEFACT")
    parser.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each request")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    manifest = load(given.artifact)
    decode = Tokenizer.load(given.artifact / TOKENIZER).decode
    limits, options = EngineLimits(max_batch_size=max(given.batches)), SessionOptions(intra_op_threads=given.threads)
    engine = build_engine(given.artifact, manifest, decode, limits, options, LastRun())
    found = {str(batch): measure(engine, manifest, batch, given.prompt, given.new) for batch in given.batches}
    print(json.dumps({"artefact": str(given.artifact), "threads": given.threads, "batches": found}))
    return 0


def measure(engine: Engine, manifest: Manifest, batch: int, prompt: int, new: int) -> dict[str, float]:
    """Median seconds of a step in which all of `batch` requests decode: in the graph, and on the host before it."""
    rng = np.random.default_rng(batch)
    for number in range(batch):
        token_ids = rng.integers(0, manifest.config.vocab_size, prompt).tolist()
        engine.add_request(
            GenerationRequest(
                request_id=f"{batch}-{number}",
                model="",
                prompt_token_ids=tuple(token_ids),
                sampling=SamplingParams(temperature=0.0),
                stopping=StoppingParams(max_tokens=new, ignore_eos=True),
            )
        )
    steps = []
    while engine.has_work:
        stats = engine.step().stats
        if stats.num_rows == stats.num_tokens == batch and stats.host_seconds is not None:
            steps.append((stats.run_seconds, stats.host_seconds))
    run, host = (statistics.median(seconds) for seconds in zip(*steps, strict=True))
    return {"run_seconds": run, "host_seconds": host, "host_share": host / (run + host)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

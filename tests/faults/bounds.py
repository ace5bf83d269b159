"""How much the server's memory may grow by: terms in bytes, each from the limit of the server that bounds it.

A test's bound is the sum of the terms that its attack reaches. gRPC, the C library and the tokenizer have no limit of
the server's: `CALL_BYTES`, `CONNECTION_BYTES`, `ALLOCATOR_BYTES` and `_TOKENIZED_BYTES` say what they are.
"""

from __future__ import annotations

from pathlib import Path

from model.spec import artifact
from service.config import ServeConfig
from service.engine.kv.budget import _WORKSPACE_BYTES, memory_needs, step_bytes
from service.engine.scheduler import EngineLimits
from service.telemetry.exposition import _MAX_CONNECTIONS, _MAX_ONE_WRITE_BYTES, _MAX_REQUEST_BYTES
from service.transport.flooding import _GROWTH_BYTES, _LOOK_SECONDS, _SPARE_BYTES, _UNREAD_BYTES
from service.transport.places import _NUM_COPIES, MAX_ANSWER_BYTES
from service.transport.receiving import MAX_BYTES

MIB = 1 << 20
_DEFAULTS = ServeConfig(models=Path())

MESSAGE_BYTES = _DEFAULTS.max_message_bytes
PLACES = MAX_BYTES // MESSAGE_BYTES
"""Messages that are read at once."""
SHARE = PLACES // 2
"""One caller's."""
WINDOW_BYTES = 64 << 10
"""Of a stream in HTTP/2: what comes of a call that is not read. The server has gRPC open no wider one (`bdp_probe`)."""
CALL_BYTES = 4 * _DEFAULTS.max_metadata_bytes
"""A call besides its message: its metadata as they came, as gRPC's and as Python's, and as much for its tasks."""
CONNECTION_BYTES = 128 << 10
"""A connection's buffers of gRPC, at most one frame each way, and its tables of headers."""
ALLOCATOR_BYTES = 24 * MIB
"""What glibc keeps of freed memory: each thread that allocates has an arena, whose end alone goes back."""
LOOK_SECONDS, SLICE_BYTES = _LOOK_SECONDS, 8 * MIB
"""What a flood brings between two looks at the connections: `Connection.flood` waits for a look after each slice."""
# By the `tokenizers` library for each token, which has a byte at least: an id, a text, offsets, masks. Measured.
_TOKENIZED_BYTES = 160
# Of steps and of requests: see --recorder-steps.
_RECORDER_BYTES = 2 * 3 * MIB


def calls(count: int, *, has_body: bool = True) -> int:
    """Calls that wait for a place, or are being refused."""
    return count * (CALL_BYTES + (WINDOW_BYTES if has_body else 0))


def messages(count: int) -> int:
    """Messages that are read, or held."""
    return count * MESSAGE_BYTES


def flood(*, is_masked: bool = False) -> int:
    """A message that is larger than it may be: two growths, what is to spare, and four looks (`FloodGuard`).

    Args:
        is_masked: by calls of the connection that are cancelled.
    """
    return 2 * _GROWTH_BYTES + _SPARE_BYTES + 4 * SLICE_BYTES + is_masked * _UNREAD_BYTES


def answers(count: int, num_bytes: int) -> int:
    """Answers that are not taken, of so many bytes each."""
    return min(count * _NUM_COPIES * num_bytes, MAX_ANSWER_BYTES)


def stream() -> int:
    """A stream of requests whose answers are not read.

    One is read, one is parsed, and those before hold less than a message may until the last one of them has come.
    """
    return messages(1) + messages(1) + messages(2)


def texts(num_waiting: int) -> int:
    """A text that is tokenized for `Tokenize`, one at a time, and parsed messages that wait for their turn."""
    return _TOKENIZED_BYTES * _DEFAULTS.limits.max_tokenize_bytes + messages(num_waiting)


def scrapes() -> int:
    """Connections of the metrics port: what each asks, and an answer as text, compressed and on its way."""
    return _MAX_CONNECTIONS * (_MAX_REQUEST_BYTES + 3 * _MAX_ONE_WRITE_BYTES)


def engine(folder: Path, num_slots: int) -> dict[str, int]:
    """Terms of a model whose rows are all taken, of a server that is given no `--kv-memory`.

    K/V of preempted requests are within those of all rows at full length, but for the row that is being saved
    (`KVLedger.preempt`).

    Args:
        folder: the artifact's.
        num_slots: `--max-batch-size`.
    """
    manifest = artifact.read_manifest(folder)
    max_prefill = EngineLimits(max_batch_size=num_slots).max_prefill_tokens
    needs = memory_needs(manifest, num_slots, max_prefill)
    return {
        "K/V that run, are saved or cached": needs.whole,
        "logits, K/V in passing, memory for copies": needs.besides + needs.prefaulted(needs.whole),
        "a row that is being saved": needs.least,
        "steps": step_bytes(manifest, num_slots, max_prefill) - _WORKSPACE_BYTES,
        "flight recorder": _RECORDER_BYTES,
    }

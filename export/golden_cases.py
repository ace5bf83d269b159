"""Plans an artifact's golden cases and computes PyTorch's answers.

The schedules cover a server's steps: prompts of several lengths, whole and in even and uneven chunks, decoding after a
prompt, from the first token and across the end of a chunk, rows that join and leave a ragged batch, and short pasts
beside one that fills the context. The start token begins outputs of encoder-decoders and a row of each case of others;
further tokens are random with a fixed seed. In quantized graphs the token table is not the head, so that a case feeds
every token where the vocabulary is small. The answers come from the reference without a cache.

For large models the cases are bounded: their length by the reference's memory and by the time of a replay at every
server start, but to no less than `MIN_TOKENS`; the number of logits by the file size, about 40 rows for a large
vocabulary, so that long outputs compare some of their tokens. parity.json says up to which length a large model is
proven.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

import numpy as np

from model.nn import reference
from model.nn.transformer import Transformer, num_parameters
from model.spec.artifact import attention_layers, attention_output
from model.spec.config import AttentionScore, ModelConfig
from model.spec.golden import Feed, Float32, GoldenCase, Int64, Step, staggered
from model.spec.golden_attention import AttentionCase

CHUNK = 128
"""The prefill chunk that the cases cross: the server's default."""

MIN_TOKENS = 512
"""Prompts and sources are proven at least so far, or to the end of the context."""
MIN_DECODED = CHUNK + 8
"""Outputs of encoder-decoders likewise."""

_SEED = 20170612
_LARGE_VOCABULARY = 8192
_MAX_SCORE_BYTES = 256 * 2**20
_MAX_PREFILL_MULTIPLICATIONS = 1.5e11
_MAX_DECODE_MULTIPLICATIONS = 1e10
_MAX_LOGITS = 1e6
_LEAST_LOGITS = 4
_MAX_VOCABULARY_MULTIPLICATIONS = 3e10
_TOKENS_PER_OUTPUT = 64
"""Of an encoder-decoder in the case that feeds every token."""
_MAX_ATTENTION_WEIGHTS = 2**17


class GoldenCaseError(Exception):
    """The reference's own answers are not finite."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A case without answers: lengths of its rows and their sources, and its schedule.

    `feeds_every_token`: its rows together have all tokens of the vocabulary, and its sources all of theirs.
    """

    name: str
    lengths: tuple[int, ...]
    steps: tuple[Step, ...]
    source_lengths: tuple[int, ...] = ()
    feeds_every_token: bool = False

    def compared(self, vocab_size: int) -> tuple[int, ...] | None:
        """Numbers of the feeds whose logits are stored; None: all, where they are few or the vocabulary is small.

        The last one, and others evenly spaced; where every token must show, the last one of each row.
        """
        num_feeds = sum(map(len, self.steps))
        most = max(_LEAST_LOGITS, int(_MAX_LOGITS / vocab_size))
        if num_feeds <= most:
            return None
        if self.feeds_every_token:
            return tuple(sorted({feed.row: number for number, feed in enumerate(chain(*self.steps))}.values()))
        return tuple(sorted({num_feeds - 1 - number * (num_feeds - 1) // (most - 1) for number in range(most)}))


def make_cases(model: Transformer, *, is_quantized: bool = False) -> tuple[GoldenCase, ...]:
    """Plans the cases that fit a model and answers them with `model.nn.reference`.

    Raises:
        GoldenCaseError: when a logit is not finite.
    """
    answers = _Answers(model)
    size = num_parameters(model)
    plans = [*plan(model.config, size), *(plan_every_token(model.config, size) if is_quantized else ())]
    return tuple(answers.complete(each) for each in plans)


def plan(config: ModelConfig, size: int) -> Iterator[Plan]:
    """The cases of a model with `size` parameters, in any precision."""
    return (_plan_encoder_decoder if config.is_encoder_decoder else _plan_decoder_only)(config, size)


def plan_every_token(config: ModelConfig, size: int) -> Iterator[Plan]:
    """A case of every token, where that takes little time, and its logits little space."""
    num_tokens = max(config.vocab_size, config.source_vocab_size)
    if num_tokens > _LARGE_VOCABULARY or num_tokens * size > _MAX_VOCABULARY_MULTIPLICATIONS:
        return
    name = f"every-token-{config.vocab_size}"
    sources: tuple[int, ...] = ()
    if config.is_encoder_decoder:
        outputs = _shares(config.vocab_size, min(_TOKENS_PER_OUTPUT, config.context))
        sources = _shares(config.source_vocab_size, min(_TOKENS_PER_OUTPUT, config.source_context))
        num_rows = max(len(outputs), len(sources))
        lengths, sources = _repeated(outputs, num_rows), _repeated(sources, num_rows)
        steps = tuple(
            tuple(Feed(row, at, 1) for row, length in enumerate(lengths) if at < length) for at in range(lengths[0])
        )
    else:
        lengths = _shares(config.vocab_size, min(CHUNK, config.context))
        steps = tuple(step for row, length in enumerate(lengths) for step in _split(row, (length,)))
    yield Plan(name, lengths, steps, sources, feeds_every_token=True)


def make_attention_cases(model: Transformer) -> tuple[AttentionCase, ...]:
    """Attention weights by `model.nn.reference` for one token, a few, and as many as half a megabyte of weights allows.

    Raises:
        GoldenCaseError: when a weight is not finite.
    """
    config = model.config
    num_matrices = config.num_heads * sum(attention_layers(config).values())
    longest = math.isqrt(_MAX_ATTENTION_WEIGHTS // num_matrices)
    cases = []
    for length in _fitting((1, 17, longest), max(1, min(config.context, longest))):
        sequence, source = _tokens(length, length, config.vocab_size), np.empty(0, np.int64)
        if config.is_encoder_decoder:
            sequence[0] = config.bos_id
            # Not the sequence's length, so that swapped axes show.
            source = _tokens(length, min(config.source_context, max(1, length * 2 // 3)), config.source_vocab_size)
        given = source.tolist() if config.is_encoder_decoder else None
        weights = {
            attention_output(kind, layer): tensor.numpy()
            for kind, tensors in reference.attention(model, sequence.tolist(), given).items()
            for layer, tensor in enumerate(tensors)
        }
        name = f"attention-{length}"
        if not all(np.isfinite(matrix).all() for matrix in weights.values()):
            raise GoldenCaseError(f"{name}: the checkpoint's own attention weights are not finite")
        cases.append(AttentionCase(name, sequence, source, weights))
    return tuple(cases)


def _plan_decoder_only(config: ModelConfig, size: int) -> Iterator[Plan]:
    longest = _longest(config.context, config, max(MIN_TOKENS, _MAX_PREFILL_MULTIPLICATIONS / size))
    # Long enough rows of `_long_pasts` already feed a chunk, and one token more.
    chunks = () if longest > CHUNK + 1 else (CHUNK, CHUNK + 1)
    for length in _fitting((1, 2, 31, *chunks), longest):
        yield Plan(f"prefill-{length}", (length,), _split(0, (length,)))
    if longest >= CHUNK + 2:
        yield Plan(f"decode-across-{CHUNK}", (CHUNK + 2,), _split(0, [CHUNK - 2] + [1] * 4))
    yield _long_pasts(longest)
    (length,) = _fitting((70,), longest)
    uneven = (length // 3, 1, length // 2, length - length // 3 - 1 - length // 2)
    yield Plan(f"uneven-chunks-{length}", (length,), _split(0, uneven))
    even = (length // 3, length // 3, length - 2 * (length // 3))
    yield Plan(f"even-chunks-{length}", (length,), _split(0, even))
    (length,) = _fitting((29,), longest)
    num_decoded = min(3, length - 1)
    yield Plan(f"prefill-decode-{length}", (length,), _split(0, [length - num_decoded] + [1] * num_decoded))
    (length,) = _fitting((6,), longest)
    yield Plan(f"decode-{length}", (length,), _split(0, [1] * length))
    lengths = _ragged(config, longest)
    yield Plan(f"ragged-{len(lengths)}", lengths, staggered(lengths))
    pasts = _fitting((17, 2, 33), max(1, longest - 2))
    prefills = [step for row, past in enumerate(pasts) for step in _split(row, (past,))]
    num_decoded = min(2, longest - max(pasts))
    decodes = [tuple(Feed(row, past + new, 1) for row, past in enumerate(pasts)) for new in range(num_decoded)]
    lengths = tuple(past + num_decoded for past in pasts)
    yield Plan(f"ragged-pasts-{len(pasts)}", lengths, (*prefills, *decodes))


def _plan_encoder_decoder(config: ModelConfig, size: int) -> Iterator[Plan]:
    longest_source = _longest(config.source_context, config, max(MIN_TOKENS, _MAX_PREFILL_MULTIPLICATIONS / size))
    longest = _longest(config.context, config, max(MIN_DECODED, _MAX_DECODE_MULTIPLICATIONS / size))
    for source_length in _fitting((1, 2, 15, 16, 17, longest_source), longest_source):
        (length,) = _fitting((3,), longest)
        yield Plan(f"source-{source_length}", (length,), _split(0, [1] * length), (source_length,))
    yield _long_output(longest, longest_source)
    lengths = _ragged(config, longest)
    sources = _clipped((7, 33, 1, 16, 20, 3, 48, 12), longest_source)[: len(lengths)]
    yield Plan(f"ragged-{len(lengths)}", lengths, staggered(lengths), sources)


def _long_pasts(longest: int) -> Plan:
    """A row prefilled in even chunks feeds its last token beside rows of shorter pasts."""
    pasts = _clipped((longest, CHUNK + 1, 33), max(1, longest - 1))
    even = [CHUNK] * (pasts[0] // CHUNK) + [pasts[0] % CHUNK]
    prefills = [*_split(0, even), *(step for row in (1, 2) for step in _split(row, (pasts[row],)))]
    lengths = tuple(min(past + 1, longest) for past in pasts)
    together = tuple(Feed(row, past, 1) for row, past in enumerate(pasts) if past < longest)
    return Plan(f"long-pasts-{longest}", lengths, (*prefills, together) if together else tuple(prefills))


def _long_output(longest: int, longest_source: int) -> Plan:
    """The longest output from the longest source; a row of a shorter source joins for its last tokens."""
    num_together = min(3, longest)
    first = longest - num_together
    together = [(Feed(0, first + new, 1), Feed(1, new, 1)) for new in range(num_together)]
    sources = _clipped((longest_source, 9), longest_source)
    return Plan(f"long-{longest}", (longest, num_together), (*_split(0, [1] * first), *together), sources)


def _ragged(config: ModelConfig, longest: int) -> tuple[int, ...]:
    large = config.vocab_size > _LARGE_VOCABULARY
    return _clipped((1, 4, 2) if large else (3, 9, 1, 12, 5, 2, 17, 7), longest)


def _longest(context: int, config: ModelConfig, max_tokens: float) -> int:
    """The context, or fewer tokens where the reference's memory or the replay's time would be too large."""
    # Numbers that the reference stores per query and key: a score per head, or the terms of an additive score.
    numbers = config.num_heads * (config.head_dim if config.attention_score is AttentionScore.ADDITIVE else 1)
    return max(1, min(context, math.isqrt(_MAX_SCORE_BYTES // (4 * numbers)), int(max_tokens)))


def _shares(num_tokens: int, longest: int) -> tuple[int, ...]:
    """Lengths of rows that have so many tokens together, the last one the rest."""
    rest = num_tokens % longest
    return (longest,) * (num_tokens // longest) + ((rest,) if rest else ())


def _repeated(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (lengths * -(-count // len(lengths)))[:count]


def _clipped(lengths: Sequence[int], longest: int) -> tuple[int, ...]:
    return tuple(min(length, longest) for length in lengths)


def _fitting(lengths: Sequence[int], longest: int) -> tuple[int, ...]:
    """The lengths clipped to the longest that fits, without duplicates."""
    return tuple(dict.fromkeys(_clipped(lengths, longest)))


def _split(row: int, counts: Iterable[int]) -> tuple[Step, ...]:
    """One row fed in chunks of these sizes, without empty ones."""
    bounds = accumulate((count for count in counts if count), initial=0)
    return tuple((Feed(row, start, end - start),) for start, end in pairwise(bounds))


@dataclass(frozen=True, slots=True)
class _Answers:
    """The reference's logits, cached by sequence: cases that split one sequence differently share them."""

    model: Transformer
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Float32] = field(default_factory=dict)

    def complete(self, plan: Plan) -> GoldenCase:
        """Draws the tokens and adds the logits after every feed."""
        config = self.model.config
        if plan.feeds_every_token:
            sequences = _every_token(plan.lengths, config.vocab_size)
            sources = _every_token(plan.source_lengths, config.source_vocab_size)
        else:
            sequences = tuple(_tokens(row, length, config.vocab_size) for row, length in enumerate(plan.lengths))
            for sequence in sequences if config.is_encoder_decoder else sequences[1:2]:
                sequence[0] = config.bos_id
            sources = tuple(
                _tokens(row, length, config.source_vocab_size) for row, length in enumerate(plan.source_lengths)
            )
        chosen = plan.compared(config.vocab_size)
        case = GoldenCase(plan.name, sequences, sources, plan.steps, np.empty((0, 0), np.float32), compared=chosen)
        rows = [
            self._logits(sequences[feed.row], sources[feed.row] if sources else None)[feed.start + feed.count - 1]
            for feed in case.compared_feeds
        ]
        logits = np.stack(rows)
        if not np.isfinite(logits).all():
            raise GoldenCaseError(f"{plan.name}: the checkpoint's own logits are not finite")
        return dataclasses.replace(case, logits=logits)

    def _logits(self, sequence: Int64, source: Int64 | None) -> Float32:
        key = (tuple(sequence.tolist()), () if source is None else tuple(source.tolist()))
        if key not in self.known:
            found = reference.logits(self.model, key[0], None if source is None else key[1])
            self.known[key] = found.numpy()
        return self.known[key]


def _tokens(row: int, length: int, vocab_size: int) -> Int64:
    """Random tokens, a function of row and length."""
    return np.random.default_rng((_SEED, row)).integers(0, vocab_size, length, dtype=np.int64)


def _every_token(lengths: Sequence[int], vocab_size: int) -> tuple[Int64, ...]:
    """Rows of all tokens in a random order, which begins again where the rows are longer."""
    if not lengths:
        return ()
    order = np.random.default_rng(_SEED).permutation(vocab_size).astype(np.int64)
    return tuple(np.split(np.resize(order, sum(lengths)), np.cumsum(lengths)[:-1]))

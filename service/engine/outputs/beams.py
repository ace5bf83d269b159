"""A request's beams as sequences: extended, forked and dropped as its search decides, and reported when it ends.

The search itself is `service.engine.sampling.beam`; K/V rows are the ledger's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from service.engine.kv.ledger import KVLedger
from service.engine.sampling.beam import Extension, Hypothesis
from service.engine.sequence import Sequence, SequenceGroup
from service.engine.types import TokenEvent, TokenLogprobs


def extend_beams(group: SequenceGroup, extensions: Collection[Extension], ledger: KVLedger) -> None:
    """Replaces a request's beams by the next step's, in the rows of beams that are dropped where possible."""
    parents = group.sequences
    beams: list[Sequence] = []
    births: list[tuple[Sequence, Sequence]] = []
    for extension in extensions:
        parent = parents[extension.parent]
        if parent in beams:
            beams.append(parent.fork())
            births.append((beams[-1], parent))
        else:
            beams.append(parent)
    ledger.rearrange(births, [parent for parent in parents if parent not in beams])
    for beam, extension in zip(beams, extensions, strict=True):
        beam.extend(extension.token_id)
    group.sequences = beams


def hypothesis_events(group: SequenceGroup, hypotheses: Collection[Hypothesis]) -> Iterator[TokenEvent]:
    """Yields the events of a search that is over, output by output and token by token."""
    for index, hypothesis in enumerate(hypotheses):
        pairs = zip(hypothesis.token_ids, hypothesis.logprobs, strict=True)
        # Where the rules leave no continuation at all, there is not even one token.
        tokens: list[tuple[int | None, TokenLogprobs | None]] = [*pairs] or [(None, None)]
        for place, (token_id, logprobs) in enumerate(tokens, 1):
            is_last = place == len(tokens)
            yield TokenEvent(
                request_id=group.request_id,
                output_index=index,
                token_id=token_id,
                logprobs=None if group.request.logprobs is None else logprobs,
                num_cached_tokens=group.num_cached_tokens,
                is_mute=is_last and group.is_mute(hypothesis.finish_reason),
                finish_reason=hypothesis.finish_reason if is_last else None,
                matched_stop=hypothesis.matched_stop if is_last else None,
                score=hypothesis.score if is_last else None,
            )

"""Draft tokens for the rows that decode: when there are any, how many, and how many were accepted.

Drafts are the tokens that a grammar forces, or else come from `prompt_lookup`. All rows of a step are fed equally many
tokens: few rows leave cores idle while weights are read, many leave no room for drafts that may be wrong. The scheduler
is the only user.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Listed
from weakref import WeakKeyDictionary

from model.spec.cost import causal_pairs
from service.engine.batch import PrefillChunk
from service.engine.sequence import Sequence
from service.engine.speculation.prompt_lookup import PromptLookup, TokenIds

MOST_FED = 32
"""Tokens that several rows are fed in one step, at most: about so many take the cores' time, not the memory's."""
# What reading the weights costs, in tokens that are computed meanwhile; and how many drafts of a look-up are accepted.
_TOKENS_OF_WEIGHTS = 6
_SHARE_OF_LOOK_UPS = 0.8


class Drafter:
    """Draft tokens of all sequences. Off until `enable`.

    `max_tokens` are draft tokens of a row in one step, at most; 0 while off. They become `max_provable_tokens` if
    proven to change no bit; these are 0 where the model forbids drafts. `num_accepted` counts drafts accepted so far,
    `num_accepted_pairs` the pairs of a query and a key that they have. `max_fed` limits `MOST_FED`.
    """

    def __init__(self, max_provable_tokens: int, max_fed: int) -> None:
        self.max_provable_tokens = max_provable_tokens
        self._most_fed = min(MOST_FED, max_fed)
        self.max_tokens = 0
        self.num_accepted = self.num_accepted_pairs = 0
        self._lookups: WeakKeyDictionary[Sequence, PromptLookup] = WeakKeyDictionary()
        # Where the last drafts came from, if from the sequence's own text.
        self._sources: dict[Sequence, PromptLookup] = {}

    def enable(self, *, is_proven: bool = True) -> None:
        """Switches speculation on, or off where a token has other bits in a chunk than computed by itself."""
        self.max_tokens = self.max_provable_tokens if is_proven else 0

    def draft(self, sequences: Listed[Sequence]) -> list[TokenIds]:
        """Draft tokens that may follow each sequence of a step; none where they would probably cost time."""
        room = self.max_tokens
        if len(sequences) > 1:
            room = min(room, self._most_fed // len(sequences) - 1)
        self._sources = {}
        if room < 1:
            return []
        drafts = [self._draft(sequence, room) for sequence in sequences]
        if len(sequences) > 1:
            shares = [_SHARE_OF_LOOK_UPS if sequence in self._sources else 1.0 for sequence in sequences]
            most = min(_best_length(drafts, shares), self._most_beside(sequences, drafts))
            drafts = [each[:most] for each in drafts]
        return drafts

    @staticmethod
    def _most_beside(sequences: Listed[Sequence], drafts: Listed[TokenIds]) -> int:
        """Draft tokens of a row for which no other row is fed tokens of its prompt again: of these, bits may differ."""
        new = (sequence.num_tokens - len(sequence.group.prompt_token_ids) for sequence in sequences)
        return max(0, min(count + len(own) for count, own in zip(new, drafts, strict=True)) - 1)

    def report(self, sequence: Sequence, chunk: PrefillChunk, num_accepted: int) -> None:
        """Reports how many of a sequence's last drafts were accepted."""
        self.num_accepted += num_accepted
        self.num_accepted_pairs += causal_pairs(num_accepted, chunk.end - chunk.num_scored + 1)
        if (source := self._sources.get(sequence)) is not None and chunk.num_scored > 1:
            source.report(chunk.num_scored - 1, num_accepted)

    def _draft(self, sequence: Sequence, most: int) -> TokenIds:
        """Short of the sequence's end; none for the first token after a prompt."""
        group = sequence.group
        # One token is sampled behind the last accepted draft.
        room = min(most, group.max_num_tokens - sequence.num_tokens - 1)
        if room < 1 or sequence.num_tokens == len(group.prompt_token_ids):
            return ()
        if sequence.rules is not None and (forced := sequence.rules.forced_tokens):
            return forced[:room]
        lookup = self._lookups.get(sequence)
        if lookup is None:
            lookup = self._lookups[sequence] = PromptLookup(self.max_tokens)
        if not (drafts := lookup.propose(sequence.token_ids, room)):
            return ()
        self._sources[sequence] = lookup
        ends = group.eos_ids | group.request.stopping.stop_token_ids
        return tuple(itertools.takewhile(lambda token_id: token_id not in ends, drafts))


def _best_length(drafts: Listed[TokenIds], shares: Iterable[float]) -> int:
    """Draft tokens of a row, at most, that give a step of several rows the most tokens for its time.

    Args:
        drafts: of each row.
        shares: of each row's drafts that are probably accepted.
    """
    weighted = [*zip(map(len, drafts), shares, strict=True)]

    def rate(length: int) -> float:
        accepted = sum(share * min(count, length) for count, share in weighted)
        return (len(weighted) + accepted) / (_TOKENS_OF_WEIGHTS + len(weighted) * (1 + length))

    return max(range(max(map(len, drafts)) + 1), key=rate)

"""Draft tokens for the one row that decodes alone: when there are any, how many, and how many were accepted.

Drafts are the tokens that a grammar forces, or else come from `prompt_lookup`. A sequence among others gets none, as
batched decoding already uses the cores. The scheduler is the only user.
"""

from __future__ import annotations

import itertools
from weakref import WeakKeyDictionary

from service.engine.sequence import Sequence
from service.engine.speculation.prompt_lookup import PromptLookup, TokenIds


class Drafter:
    """Draft tokens of all sequences. Off until `enable`.

    `max_tokens` are draft tokens of one step, at most; 0 while off. They become `max_provable_tokens` if proven to
    change no bit; these are 0 where the model forbids drafts. `num_accepted` counts drafts accepted so far.
    """

    def __init__(self, max_provable_tokens: int) -> None:
        self.max_provable_tokens = max_provable_tokens
        self.max_tokens = 0
        self.num_accepted = 0
        self._lookups: WeakKeyDictionary[Sequence, PromptLookup] = WeakKeyDictionary()
        # Where the last drafts came from, if from the sequence's own text.
        self._source: PromptLookup | None = None

    def enable(self, *, is_proven: bool = True) -> None:
        """Switches speculation on, or off where a token has other bits in a chunk than computed by itself."""
        self.max_tokens = self.max_provable_tokens if is_proven else 0

    def draft(self, sequence: Sequence) -> TokenIds:
        """Draft tokens that may follow a sequence, short of its end; none for the first token after a prompt."""
        group = sequence.group
        # One token is sampled behind the last accepted draft.
        room = min(self.max_tokens, group.max_num_tokens - sequence.num_tokens - 1)
        if room < 1 or sequence.num_tokens == len(group.prompt_token_ids):
            return ()
        self._source = None
        if sequence.rules is not None and (forced := sequence.rules.forced_tokens):
            return forced[:room]
        lookup = self._lookups.get(sequence)
        if lookup is None:
            lookup = self._lookups[sequence] = PromptLookup(self.max_tokens)
        ends = group.eos_ids | group.request.stopping.stop_token_ids
        self._source = lookup
        drafts = lookup.propose(sequence.token_ids, room)
        return tuple(itertools.takewhile(lambda token_id: token_id not in ends, drafts))

    def report(self, num_drafted: int, num_accepted: int) -> None:
        """Reports how many of the last drafts were accepted."""
        self.num_accepted += num_accepted
        if self._source is not None:
            self._source.report(num_drafted, num_accepted)

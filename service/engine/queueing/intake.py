"""From a request to its `SequenceGroup`: lengths checked, outputs laid out, rules and text streams made.

Knows the model, and no slots, no memory and no other request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from model.spec.generation import NO_RULES, GenerationRules
from service.engine.logits import LogitsRules, make_beam_rules, make_model_rules, make_rules
from service.engine.queueing.waiting import due_time
from service.engine.sampling.beam import BeamSearch
from service.engine.sampling.text import Decode, TextStream
from service.engine.sequence import Sequence, SequenceGroup
from service.engine.types import GenerationRequest
from service.errors import InvalidRequest, PromptTooLong


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What scheduling must know of a model; `source_context` and `decoder_start_id` make it an encoder-decoder."""

    context: int
    eos_ids: frozenset[int]
    source_context: int | None = None
    decoder_start_id: int = 0
    generation: GenerationRules = NO_RULES

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether prompts are sources, encoded once."""
        return self.source_context is not None

    @property
    def speculation_obstacle(self) -> str | None:
        """Why there can be no draft tokens, whatever computes them; None where there can be."""
        if self.is_encoder_decoder:
            return "its decoder computes token by token"
        if names := list(dict.fromkeys(name for name, _ in self.generation.named_ids)):
            return f"rules of its own ({', '.join(names)}) hold for every output, and rules count tokens as they come"
        return None


class Intake:
    """Makes sequence groups, numbered in the order of arrival. Arguments are those of the scheduler."""

    def __init__(
        self, model: ModelShape, decode: Decode, draw_seed: Callable[[], int], patience: float | None = None
    ) -> None:
        self._model = model
        self._decode = decode
        self._draw_seed = draw_seed
        self._patience = patience
        self._orders = itertools.count()

    def measure(self, request: GenerationRequest) -> SequenceGroup:
        """Checks lengths; the group has no outputs yet, which suffices to look up its cached tokens.

        Raises:
            InvalidRequest: when something is out of range.
        """
        self._check(request)
        model, prompt, stopping = self._model, request.prompt_token_ids, request.stopping
        given = (model.decoder_start_id, *request.target_prefix_token_ids) if model.is_encoder_decoder else prompt
        eos_ids = frozenset() if stopping.ignore_eos else model.eos_ids
        max_num_tokens = min(model.context, len(given) + stopping.max_tokens)
        beams, beam_search = None, request.beam_search
        if beam_search is not None:
            if beam_search.patience is None:
                beam_search = replace(beam_search, patience=model.generation.patience)
            beams = BeamSearch(beam_search, max_num_tokens - len(given), eos_ids, stopping.stop_token_ids)
        return SequenceGroup(
            request=request,
            order=next(self._orders),
            due=due_time(request, self._patience),
            source_token_ids=prompt if model.is_encoder_decoder else (),
            prompt_token_ids=given,
            max_num_tokens=max_num_tokens,
            eos_ids=eos_ids,
            is_forked=beams is not None or request.sampling.n == 1,
            beams=beams,
        )

    def add_outputs(self, group: SequenceGroup) -> None:
        """Gives a measured request its outputs: one sequence each, or the first beam."""
        request, given = group.request, group.prompt_token_ids
        sampling, stopping = request.sampling, request.stopping
        seed = self._draw_seed() if sampling.seed is None else sampling.seed
        # Made once and forked: rules may name all of the prompt and of the vocabulary.
        rules = self._make_rules(group)
        for index in range(1 if group.beams is not None else sampling.n):
            text = None
            if stopping.stop:
                text = TextStream(
                    self._decode,
                    stopping.stop,
                    include_stop=stopping.include_stop_in_output,
                    prefix_token_ids=request.target_prefix_token_ids,
                )
            sequence = Sequence(
                group=group,
                index=index,
                # The last token of a prompt that is only scored is never fed.
                token_ids=list(given if group.generates else given[:-1]),
                seed=seed,
                text=text,
                rules=rules if rules is None or index == 0 else rules.fork(),
            )
            group.sequences.append(sequence)

    def _make_rules(self, group: SequenceGroup) -> LogitsRules | None:
        request, given, model = group.request, group.prompt_token_ids, self._model
        prefix = request.target_prefix_token_ids
        seen = prefix if model.is_encoder_decoder else given
        max_tokens = group.max_num_tokens - len(given)
        generation, matcher = model.generation, None
        if request.grammar is not None:
            # An end that is forced by the length would pass for one that the grammar allows.
            generation = replace(generation, forced_last_id=None)
            matcher = request.grammar.start(may_end=not request.stopping.ignore_eos, is_beginning=not prefix)
        own = make_model_rules(generation, max_tokens=max_tokens, has_prefix=bool(prefix))
        if request.beam_search is None:
            arrays = request.sampling_arrays
            return make_rules(request.sampling, request.stopping, model.eos_ids, seen, own, arrays, matcher)
        renormalize = model.generation.renormalize
        return make_beam_rules(
            request.beam_search, request.stopping, model.eos_ids, seen, own, matcher, renormalize=renormalize
        )

    def _check(self, request: GenerationRequest) -> None:
        """Refuses lengths out of range: something must be given, and there must be room to generate or to score."""
        prompt, prefix, scoring = request.prompt_token_ids, request.target_prefix_token_ids, request.scoring
        max_tokens = request.stopping.max_tokens
        is_single = request.beam_search is None and request.num_rows == 1
        if max_tokens < 1 and (max_tokens < 0 or scoring is None or not is_single):
            raise InvalidRequest("stopping.max_tokens", max_tokens, "must be at least 1")
        num_reserved = min(max_tokens, 1)
        room = self._model.context - num_reserved
        longest = room if self._model.source_context is None else self._model.source_context
        if not prompt:
            raise InvalidRequest("prompt", prompt, "must have at least 1 token")
        if len(prompt) > longest:
            raise PromptTooLong("prompt", len(prompt), f"must have at most {longest} tokens")
        if prefix and not self._model.is_encoder_decoder:
            raise InvalidRequest("target_prefix", prefix, "must be empty for a decoder-only model")
        if prefix and len(prefix) >= room:
            raise PromptTooLong("target_prefix", len(prefix), f"must have at most {room - 1} tokens")
        num_given = 1 + len(prefix) if self._model.is_encoder_decoder else len(prompt)
        # Without a token to generate, one to score must be the sequence's end.
        most = num_given - 1 + num_reserved
        if scoring is not None and not 1 <= scoring.start <= most:
            raise InvalidRequest("scoring.start", scoring.start, f"must be from 1 to {most}")

"""Counts a request's work: its shape for `model.spec.cost`, by the engine's rules for chunks and padding.

Its seconds are `service.forecasting.prediction`'s. Knows nothing of other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.spec.config import ModelConfig
from model.spec.cost import RequestCost, RequestShape, RequestWork, request_cost, request_work
from service.engine.chunks import ChunkRules
from service.engine.types import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a request costs: `counts` by the model's arithmetic, and seconds of service without the queue.

    `predicted_seconds` is None while too few steps were seen, `measured_seconds` before it ran.
    """

    counts: RequestCost
    predicted_seconds: float | None
    measured_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Counts one model's requests.

    Attributes:
        config: the model.
        chunk_rules: its engine's chunk rules.
        kv_token_bytes: bytes of a token's K/V in memory, the decoder's or its source's; None is float32's.
    """

    config: ModelConfig
    chunk_rules: ChunkRules
    kv_token_bytes: int | None = None

    def most_tokens(self, request: GenerationRequest) -> int:
        """The most tokens of an output: `max_tokens`, cut to the context."""
        return max(0, min(request.stopping.max_tokens, self.config.context - self._num_given(request)))

    def shape(
        self, request: GenerationRequest, cached_tokens: int = 0, generated_tokens: Sequence[int] | None = None
    ) -> RequestShape:
        """What the request's cost depends on; `generated_tokens` of each row are by default as many as it may have."""
        is_scored = request.scoring is not None
        # The last token of a prompt that is only scored is not computed. The engine refuses an empty prompt.
        prompt = max(1, self._num_given(request) - (0 if request.stopping.max_tokens else 1))
        source = len(request.prompt_token_ids) if self.config.is_encoder_decoder else 0
        beginning = min(prompt, self.chunk_rules.chunk)
        is_padded = self.chunk_rules.is_short(0, beginning) and not is_scored
        if generated_tokens is None:
            generated_tokens = (self.most_tokens(request),) * request.num_rows
        return RequestShape(
            prompt_tokens=prompt,
            generated_tokens=tuple(generated_tokens),
            source_tokens=source,
            cached_tokens=cached_tokens,
            chunk=self.chunk_rules.chunk,
            padded_prompt_tokens=self.chunk_rules.padded_prompt_length(beginning) if is_padded else None,
            padded_source_tokens=self.chunk_rules.padded_source_length(source) if source else None,
            scores_prompt=is_scored,
        )

    def alone(self, shape: RequestShape) -> RequestShape:
        """The shape of a decoder-only request that begins alone, where chunks of its prompt are merged."""
        merged = 0 if shape.scores_prompt else self.chunk_rules.long_run // self.chunk_rules.chunk
        return replace(shape, merged_chunks=max(1, merged))

    def work(self, request: GenerationRequest, cached_tokens: int = 0) -> RequestWork:
        """Its work if outputs are as long as they may be."""
        return request_work(self.shape(request, cached_tokens))

    def count(self, shape: RequestShape) -> RequestCost:
        """What a request of this shape costs."""
        return request_cost(self.config, shape, self.kv_token_bytes)

    def _num_given(self, request: GenerationRequest) -> int:
        if self.config.is_encoder_decoder:
            return 1 + len(request.target_prefix_token_ids)
        return len(request.prompt_token_ids)

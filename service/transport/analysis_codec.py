"""Protobuf to values and back for `Score`, `Explain` and `Estimate`; `codec` has generation and what both share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from model.spec.artifact import AttentionKind
from onward.v1 import generation_pb2 as pb
from service.explain.explaining import ExplainCall, Explanation
from service.forecasting.prediction import Estimate
from service.scoring import Score, ScoreCall
from service.transport.codec import decode_prompt, draw_id, encode_cost, given, require, require_count, text_or_ids

ATTENTION_KINDS: Mapping[AttentionKind, pb.AttentionKind.ValueType] = {
    AttentionKind.ENCODER: pb.ATTENTION_KIND_ENCODER,
    AttentionKind.DECODER: pb.ATTENTION_KIND_DECODER,
    AttentionKind.CROSS: pb.ATTENTION_KIND_CROSS,
}

_DEFAULT_EXPLAINED_TOKENS = 64


def decode_score(message: pb.ScoreRequest, new_id: Callable[[], str] = draw_id) -> ScoreCall:
    """Decodes a request to score; draws an id for the log.

    Raises:
        InvalidRequest: naming the first field beyond its limit.
    """
    return ScoreCall(
        request_id=new_id(), model=message.model, prompt=decode_prompt(message), target=text_or_ids(message, "target")
    )


def decode_explain(message: pb.ExplainRequest, new_id: Callable[[], str] = draw_id) -> ExplainCall:
    """Decodes a request for attention; draws an id for what is generated.

    Raises:
        InvalidRequest: naming the first field beyond its limit.
    """
    kinds = {number: kind for kind, number in ATTENTION_KINDS.items()}
    require_count("kinds", message.kinds, len(kinds))
    for index, number in enumerate(message.kinds):
        limit = f"must be one of {', '.join(map(pb.AttentionKind.Name, kinds))}"
        require(f"kinds[{index}]", number, limit, valid=number in kinds)
    max_tokens = given(message, "max_tokens", _DEFAULT_EXPLAINED_TOKENS)
    require("max_tokens", max_tokens, "must be at least 1", valid=max_tokens >= 1)
    return ExplainCall(
        request_id=new_id(),
        model=message.model,
        prompt=decode_prompt(message),
        target=text_or_ids(message, "target"),
        kinds=tuple(kinds[number] for number in message.kinds),
        layers=tuple(message.layers),
        heads=tuple(message.heads),
        max_tokens=max_tokens,
    )


def encode_score(score: Score) -> pb.ScoreResponse:
    """Scored tokens and their totals."""
    pairs = zip(score.token_ids, score.logprobs, strict=True)
    return pb.ScoreResponse(
        tokens=[pb.ScoreResponse.TokenScore(token_id=token_id, logprob=logprob) for token_id, logprob in pairs],
        total_logprob=score.total_logprob,
        perplexity=score.perplexity,
        bits_per_byte=score.bits_per_byte,
    )


def encode_explanation(explanation: Explanation) -> pb.ExplainResponse:
    """Tokens and matrices, up to megabytes: call this off the event loop."""
    response = pb.ExplainResponse(
        prompt_tokens=explanation.prompt_tokens,
        target_tokens=explanation.target_tokens,
        decoder_tokens=explanation.decoder_tokens,
    )
    for matrix in explanation.matrices:
        rows, columns = matrix.weights.shape
        response.attentions.add(
            kind=ATTENTION_KINDS[matrix.kind],
            layer=matrix.layer,
            head=matrix.head,
            rows=rows,
            columns=columns,
            weights=matrix.weights.ravel().tolist(),
        )
    return response


def encode_estimate(estimate: Estimate) -> pb.EstimateResponse:
    """The predicted cost and times of a request."""
    message = pb.EstimateResponse(cost=encode_cost(estimate.cost))
    if estimate.prediction is not None:
        message.queue_seconds = estimate.prediction.queue_seconds
        message.finish_seconds = estimate.prediction.finish_seconds
        message.sharing_factor = estimate.prediction.sharing_factor
    return message

"""The model's own defaults over real gRPC: both doors, estimates, and the switch that turns them off."""

from __future__ import annotations

import dataclasses
from typing import Any

from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from service.config import Defaults
from service.repository.models import ServedModel
from tests.servers import Running, infer_request, running, served_model

SEED = 3
OWN = {"imported": {"generation_defaults": {"do_sample": True, "top_k": 1, "max_new_tokens": 7}}}


def imported() -> ServedModel:
    """A model whose import recorded defaults. With `top_k` 1 sampling is greedy."""
    model = served_model()
    return dataclasses.replace(model, manifest=dataclasses.replace(model.manifest, training=OWN))


async def tokens(server: Running, **sampling: Any) -> list[int]:
    request = pb.GenerateRequest(text="ab", sampling=pb.SamplingParams(seed=SEED, **sampling))
    return list((await server.generation.Generate(request)).outputs[0].token_ids)


async def defaults(server: Running) -> model_pb2.GenerationDefaults:
    return (await server.models.GetModel(model_pb2.GetModelRequest())).generation_defaults


async def test_encoder_decoder_is_greedy_unless_a_request_gives_a_temperature() -> None:
    async with running([served_model(encoder_decoder=True)]) as server:
        assert await tokens(server) == await tokens(server, temperature=0)
        assert await tokens(server) != await tokens(server, temperature=1)
        assert (await defaults(server)).temperature == 0
    async with running([served_model(encoder_decoder=True)], generation_defaults=Defaults.NONE) as server:
        assert await tokens(server) == await tokens(server, temperature=1)
        assert (await defaults(server)).temperature == 1


async def test_imported_defaults_apply_at_both_doors_and_are_shown() -> None:
    async with running([imported()]) as server:
        greedy = await tokens(server, temperature=0)
        assert len(greedy) == 7
        assert await tokens(server) == greedy
        assert await tokens(server, top_k=0) != greedy
        request = pb.GenerateStreamRequest(text="ab", sampling=pb.SamplingParams(seed=SEED))
        events = [event async for event in server.generation.GenerateStream(request)]
        assert [token for event in events for token in event.delta.token_ids] == greedy
        asked = infer_request(seed=SEED)
        del asked.parameters["temperature"]
        answer = await GRPCInferenceServiceStub(server.channel).ModelInfer(asked)
        assert answer.parameters["generated_tokens"].int64_param == 7
        shown = await defaults(server)
        assert (shown.temperature, shown.top_k, shown.max_tokens, shown.patience) == (1.0, 1, 7, 1.0)


async def test_estimate_counts_the_default_number_of_tokens() -> None:
    async with running([imported()]) as server:
        costs = [
            await server.generation.Estimate(
                pb.EstimateRequest(request=pb.GenerateRequest(text="ab", stopping=stopping))
            )
            for stopping in (None, pb.StoppingParams(max_tokens=7), pb.StoppingParams(max_tokens=8))
        ]
        pairs = [answer.cost.attended_pairs for answer in costs]
        assert pairs[0] == pairs[1] < pairs[2]

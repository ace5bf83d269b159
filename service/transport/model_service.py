"""`onward.v1.ModelService`: which models are served, what each can do, and its proof on demand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from model.spec.artifact import Device
from model.spec.config import Architecture
from model.spec.golden import CaseResult
from onward.v1 import model_pb2 as pb
from onward.v1.model_pb2_grpc import ModelServiceServicer
from service.config import ServeConfig
from service.repository.entry import Models
from service.repository.library import Library
from service.repository.models import ModelState, Parity, ServedModel

Context = grpc.aio.ServicerContext[Any, Any]

FAMILIES: Mapping[Architecture, pb.ModelFamily.ValueType] = {
    Architecture.DECODER_ONLY: pb.MODEL_FAMILY_DECODER_ONLY,
    Architecture.ENCODER_DECODER: pb.MODEL_FAMILY_ENCODER_DECODER,
}
STATES: Mapping[ModelState, pb.ModelState.ValueType] = {
    ModelState.STARTING: pb.MODEL_STATE_STARTING,
    ModelState.SERVING: pb.MODEL_STATE_SERVING,
    ModelState.FAILED: pb.MODEL_STATE_FAILED,
    ModelState.DRAINING: pb.MODEL_STATE_DRAINING,
}


class ModelServicer(ModelServiceServicer):
    """Answers questions about the served models.

    Args:
        models: what is served.
        verify: replays a model's golden cases and takes note of the outcome.
        library: loads and unloads models, and knows what memory they have.
        config: the operator's limits.
    """

    def __init__(
        self, models: Models, verify: Callable[[str], Awaitable[Parity]], library: Library, config: ServeConfig
    ) -> None:
        self._models = models
        self._verify = verify
        self._library = library
        self._config = config

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Names, families, states."""
        response = pb.ListModelsResponse()
        for name in self._models.names:
            architecture = self._models.resolve(name).manifest.config.architecture
            state = STATES[self._models.state(name)]
            response.models.add(name=name, family=FAMILIES[architecture], state=state)
        return response

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Everything a client may want to know before it asks."""
        model = self._models.resolve(request.model)
        parity = self._models.parity(model.name)
        kv_bytes, kv_used_bytes = self._library.kv_memory(model.name)
        return pb.GetModelResponse(
            model=model.name,
            state=STATES[self._models.state(model.name)],
            architecture=_architecture(model),
            limits=_limits(model, self._config, kv_bytes),
            capabilities=describe_capabilities(
                is_encoder_decoder=model.manifest.config.is_encoder_decoder,
                has_chat=model.chat is not None,
                explains=model.explains,
            ),
            parity=None if parity is None else _summary(parity),
            device=model.manifest.device,
            precision=model.manifest.precision,
            prefill_provider=_prompts_by(model),
            kv_memory_used_bytes=kv_used_bytes,
        )

    async def VerifyParity(self, request: pb.VerifyParityRequest, context: Context) -> pb.VerifyParityResponse:
        """Waits until the model is idle, but not for long, then replays; requests that arrive meanwhile wait."""
        model = self._models.resolve(request.model)
        parity = await self._verify(model.name)
        return pb.VerifyParityResponse(parity=_summary(parity), cases=map(_case, parity.cases))

    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> pb.LoadModelResponse:
        """Answers once the model is proven and serves."""
        await self._library.load(request.model)
        return pb.LoadModelResponse()

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Context) -> pb.UnloadModelResponse:
        """Answers once the model's last request is over."""
        await self._library.unload(request.model)
        return pb.UnloadModelResponse()

    async def ReloadModel(self, request: pb.ReloadModelRequest, context: Context) -> pb.ReloadModelResponse:
        """Answers once new requests go to what the folder now holds."""
        await self._library.reload(request.model)
        return pb.ReloadModelResponse()


def _architecture(model: ServedModel) -> pb.ModelArchitecture:
    config = model.manifest.config
    return pb.ModelArchitecture(
        family=FAMILIES[config.architecture],
        vocab_size=config.vocab_size,
        source_vocab_size=config.source_vocab_size,
        context=config.context,
        source_context=config.source_context,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_encoder_layers=config.num_encoder_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        d_ff=config.d_ff,
        positions=config.positions,
        norm=config.norm,
        activation=config.activation,
    )


def _prompts_by(model: ServedModel) -> str:
    """What computes a model's prompts: a device computes everything."""
    manifest = model.manifest
    return manifest.device if manifest.device is Device.CUDA else model.prefill_provider


def _limits(model: ServedModel, config: ServeConfig, kv_bytes: int) -> pb.ModelLimits:
    limits = config.request_limits
    return pb.ModelLimits(
        max_prompt_tokens=model.max_prompt_tokens,
        max_generated_tokens=limits.max_generated_tokens,
        max_stop_strings=limits.max_stop_strings,
        max_stop_string_length=limits.max_stop_string_length,
        max_stop_token_ids=limits.max_stop_token_ids,
        max_logprobs=limits.max_logprobs,
        max_logit_bias=limits.max_logit_bias,
        max_target_prefix_tokens=model.max_target_prefix_tokens,
        max_request_id_length=limits.max_request_id_length,
        max_batch_size=config.max_batch_size,
        max_queue_size=config.max_queue_size,
        max_message_bytes=config.max_message_bytes,
        max_tokenize_bytes=limits.max_tokenize_bytes,
        max_detokenize_tokens=limits.max_detokenize_tokens,
        max_outputs=limits.max_outputs,
        max_beam_size=limits.max_beam_size,
        max_explain_tokens=limits.max_explain_tokens if model.explains else 0,
        kv_memory_bytes=kv_bytes,
    )


def describe_capabilities(*, is_encoder_decoder: bool, has_chat: bool, explains: bool) -> pb.ModelCapabilities:
    """What `transport.codec` lets through, as far as family and artifact have it; a test keeps the two together."""
    return pb.ModelCapabilities(
        streaming=True,
        sampling=True,
        logprobs=True,
        stop_strings=True,
        beam_search=True,
        multiple_outputs=True,
        priority=True,
        partial_on_deadline=True,
        penalties=True,
        logit_control=True,
        min_tokens=True,
        scoring=True,
        cost=True,
        target_prefix=is_encoder_decoder,
        chat=has_chat,
        explain=explains,
    )


def _summary(parity: Parity) -> pb.ParitySummary:
    return pb.ParitySummary(
        passed=parity.passed,
        num_cases=len(parity.cases),
        max_abs_error=parity.max_abs_error,
        min_agreement=parity.min_agreement,
    )


def _case(case: CaseResult) -> pb.VerifyParityResponse.Case:
    return pb.VerifyParityResponse.Case(
        name=case.name,
        passed=case.passed,
        max_abs_error=case.max_abs_error,
        max_relative_error=case.max_relative_error,
        agreement=case.agreement,
        tolerance=case.tolerance,
    )

"""`onward.v1.ModelService`: describes, verifies, loads and unloads models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from model.spec.config import Architecture
from onward.v1 import model_pb2 as pb
from onward.v1.model_pb2_grpc import ModelServiceServicer
from service.config import ServeConfig
from service.repository.entry import Models
from service.repository.library import Library
from service.repository.models import ModelState, Parity, ServedModel
from service.transport.sending import Context

FAMILIES: Mapping[Architecture, pb.ModelFamily.ValueType] = {
    Architecture.DECODER_ONLY: pb.MODEL_FAMILY_DECODER_ONLY,
    Architecture.ENCODER_DECODER: pb.MODEL_FAMILY_ENCODER_DECODER,
}
_Message = TypeVar("_Message", bound=Message)
STATES: Mapping[ModelState, pb.ModelState.ValueType] = {
    ModelState.STARTING: pb.MODEL_STATE_STARTING,
    ModelState.SERVING: pb.MODEL_STATE_SERVING,
    ModelState.FAILED: pb.MODEL_STATE_FAILED,
    ModelState.DRAINING: pb.MODEL_STATE_DRAINING,
}


class ModelServicer(ModelServiceServicer):
    """Answers `ModelService`.

    Args:
        models: what is served.
        verify: replays a model's golden cases and records the outcome.
        library: loads and unloads models, and accounts for their memory.
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
        """Limits, capabilities, parity and state of a model."""
        model = self._models.resolve(request.model)
        config = model.manifest.config
        parity = self._models.parity(model.name)
        kv_bytes, kv_used_bytes = self._library.kv_memory(model.name)
        return pb.GetModelResponse(
            model=model.name,
            state=STATES[self._models.state(model.name)],
            architecture=_copy(pb.ModelArchitecture, config, family=FAMILIES[config.architecture]),
            limits=_limits(model, self._config, kv_bytes),
            capabilities=describe_capabilities(
                is_encoder_decoder=config.is_encoder_decoder,
                has_chat=model.chat is not None,
                explains=model.explains,
                has_grammars=model.vocabulary is not None,
            ),
            parity=None if parity is None else _summary(parity),
            device=model.manifest.device,
            precision=model.manifest.precision,
            prefill_provider=model.manifest.device,
            kv_memory_used_bytes=kv_used_bytes,
            generation_defaults=_copy(
                pb.GenerationDefaults,
                self._models.defaults(model.name),
                patience=model.manifest.generation.patience,
            ),
        )

    async def VerifyParity(self, request: pb.VerifyParityRequest, context: Context) -> pb.VerifyParityResponse:
        """Replays the golden cases once the model is idle; requests that arrive meanwhile wait."""
        model = self._models.resolve(request.model)
        parity = await self._verify(model.name)
        return pb.VerifyParityResponse(
            parity=_summary(parity), cases=[_copy(pb.VerifyParityResponse.Case, case) for case in parity.cases]
        )

    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> pb.LoadModelResponse:
        """Answers once the model is verified and serves."""
        await self._library.load(request.model)
        return pb.LoadModelResponse()

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Context) -> pb.UnloadModelResponse:
        """Answers once the model's last request is over."""
        await self._library.unload(request.model)
        return pb.UnloadModelResponse()

    async def ReloadModel(self, request: pb.ReloadModelRequest, context: Context) -> pb.ReloadModelResponse:
        """Answers once new requests go to the folder's new artifact."""
        await self._library.reload(request.model)
        return pb.ReloadModelResponse()


def _copy(kind: type[_Message], source: object, **others: Any) -> _Message:
    """A message whose fields are the source's attributes of the same names, but for `others`."""
    names = kind.DESCRIPTOR.fields_by_name.keys() - others.keys()
    return kind(**{name: getattr(source, name) for name in names}, **others)


def _limits(model: ServedModel, config: ServeConfig, kv_bytes: int) -> pb.ModelLimits:
    limits = config.request_limits
    return _copy(
        pb.ModelLimits,
        limits,
        max_prompt_tokens=model.max_prompt_tokens,
        max_target_prefix_tokens=model.max_target_prefix_tokens,
        max_batch_size=config.max_batch_size,
        max_queue_size=config.max_queue_size,
        max_message_bytes=config.max_message_bytes,
        max_explain_tokens=limits.max_explain_tokens if model.explains else 0,
        kv_memory_bytes=kv_bytes,
    )


def describe_capabilities(
    *, is_encoder_decoder: bool, has_chat: bool, explains: bool, has_grammars: bool
) -> pb.ModelCapabilities:
    """The features that `transport.codec` accepts, and family and artifact have; a test keeps the two together."""
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
        structured_output=has_grammars,
    )


def _summary(parity: Parity) -> pb.ParitySummary:
    return _copy(pb.ParitySummary, parity, num_cases=len(parity.cases))

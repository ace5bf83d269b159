"""Encodes prompts as requests and decodes answers, for both protocols; shared by the asyncio client and Locust's user.

The protocols are `onward.v1` and version 2 of the Open Inference Protocol with a text model (a BYTES tensor
`text_input` in, BYTES tensors `text_output` out).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import grpc

from loadtest.core.records import IN_STREAM, Piece
from loadtest.core.workload import Prompt
from onward.inference import open_inference_pb2 as oip
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2 as models

TEXT_INPUT = "text_input"
TEXT_OUTPUT = "text_output"
FINAL_RESPONSE = "triton_final_response"
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
REAL_STATUSES = (("triton_grpc_error", "true"),)
"""Metadata that makes a server end a failed stream with the error's status instead of an error message and OK."""
_LENGTH_BYTES = 4
_STATUS = re.compile(r"\[([A-Z_]+)\] (.*)", re.DOTALL)
_CODES = frozenset(code.name for code in grpc.StatusCode) - {grpc.StatusCode.OK.name}
_TEXT = (
    "air arm bank book cat city day door earth eye face farm fire fish floor fruit game glass gold hand hill home "
    "horse ice idea king lake land leaf letter light line milk moon morning mouth music name night oil page paper park "
    "people picture plant rain ring river road room sea ship side silver sky snow song star stone street sun table "
    "tree wall water wind window wood word work year"
)
WORDS = tuple(_TEXT.split())
"""Words of prompts where token ids cannot be sent: one per id, modulo their number."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options. `ignore_eos` gives every answer its full length, so that runs are comparable."""

    temperature: float = 0.0
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """A model's name, vocabulary size and batch size."""

    model: str
    vocab_size: int
    max_batch_size: int | None = None
    """None if the protocol does not report it."""


def onward_facts(response: models.GetModelResponse) -> Facts:
    """Facts from `onward.v1`; an encoder-decoder's prompt is its source."""
    architecture = response.architecture
    return Facts(
        model=response.model,
        vocab_size=architecture.source_vocab_size or architecture.vocab_size,
        max_batch_size=response.limits.max_batch_size,
    )


def onward_request(prompt: Prompt, request_id: str, model: str, sampling: Sampling) -> pb.GenerateStreamRequest:
    """The prompt as a streaming request of `onward.v1`."""
    return pb.GenerateStreamRequest(
        request_id=request_id,
        model=model,
        token_ids=pb.TokenIds(ids=prompt.token_ids),
        sampling=pb.SamplingParams(temperature=sampling.temperature),
        stopping=pb.StoppingParams(max_tokens=prompt.max_tokens, ignore_eos=sampling.ignore_eos),
    )


def onward_whole_request(prompt: Prompt, request_id: str, model: str, sampling: Sampling) -> pb.GenerateRequest:
    """The prompt as a unary request of `onward.v1`."""
    # Both requests have the same fields under the same numbers.
    request = onward_request(prompt, request_id, model, sampling)
    return pb.GenerateRequest.FromString(request.SerializeToString())


def onward_answer(response: pb.GenerateResponse) -> Piece:
    """Decodes a unary answer of `onward.v1`."""
    usage = response.usage
    tokens = sum(len(output.token_ids) for output in response.outputs)
    return Piece(tokens, is_last=True, prompt_tokens=usage.prompt_tokens, generated_tokens=usage.generated_tokens)


def onward_piece(event: pb.GenerateStreamResponse) -> Piece:
    """Decodes a stream event of `onward.v1`; the summary is the final message."""
    if event.HasField("summary"):
        usage = event.summary.usage
        return Piece(0, is_last=True, prompt_tokens=usage.prompt_tokens, generated_tokens=usage.generated_tokens)
    return Piece(len(event.delta.token_ids))


@dataclass(frozen=True, slots=True)
class TextModel:
    """A text model of the Open Inference Protocol, from its metadata; `inputs` maps names to type and shape.

    Text uses the tensors `text_input` and `text_output`, or a model's only BYTES tensor. Declared inputs among
    `stream`, `max_tokens`, `temperature`, `sampling_parameters` and `exclude_input_in_output` are sent as tensors, the
    others as request parameters with the names of `onward.v1`.
    """

    name: str
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    text_input: str = TEXT_INPUT
    text_output: str = TEXT_OUTPUT

    @classmethod
    def from_metadata(cls, metadata: oip.ModelMetadataResponse) -> TextModel:
        """Reads the metadata; raises ValueError if the model is not a text model."""
        inputs = {each.name: (each.datatype, tuple(each.shape)) for each in metadata.inputs}
        text_input = _text_tensor(metadata.name, TEXT_INPUT, metadata.inputs)
        text_output = _text_tensor(metadata.name, TEXT_OUTPUT, metadata.outputs)
        return cls(metadata.name, inputs, text_input, text_output)

    def request(
        self, prompt: Prompt, request_id: str, sampling: Sampling, *, is_streamed: bool = True
    ) -> oip.ModelInferRequest:
        """The prompt as one request: a word per token, because the protocol has no token ids."""
        request = oip.ModelInferRequest(model_name=self.name, id=request_id)
        if is_streamed:
            request.parameters[EMPTY_FINAL_RESPONSE].bool_param = True
        text = " ".join(WORDS[token % len(WORDS)] for token in prompt.token_ids)
        self._add(request, self.text_input, oip.InferTensorContents(bytes_contents=[text.encode()]))
        if "stream" in self.inputs:
            self._add(request, "stream", oip.InferTensorContents(bool_contents=[is_streamed]))
        if "exclude_input_in_output" in self.inputs:
            self._add(request, "exclude_input_in_output", oip.InferTensorContents(bool_contents=[True]))
        if "sampling_parameters" in self.inputs:
            # The server's engine parses these and expects numbers as text.
            values = {
                "max_tokens": str(prompt.max_tokens),
                "temperature": str(sampling.temperature),
                "ignore_eos": sampling.ignore_eos,
            }
            contents = oip.InferTensorContents(bytes_contents=[json.dumps(values).encode()])
            self._add(request, "sampling_parameters", contents)
            return request
        if "max_tokens" in self.inputs:
            self._add(request, "max_tokens", oip.InferTensorContents(int_contents=[prompt.max_tokens]))
        else:
            request.parameters["max_tokens"].int64_param = prompt.max_tokens
        if "temperature" in self.inputs:
            self._add(request, "temperature", oip.InferTensorContents(fp32_contents=[sampling.temperature]))
        else:
            request.parameters["temperature"].double_param = sampling.temperature
        request.parameters["ignore_eos"].bool_param = sampling.ignore_eos
        return request

    def _add(self, request: oip.ModelInferRequest, name: str, contents: oip.InferTensorContents) -> None:
        datatype, shape = self.inputs[name]
        if name == "max_tokens" and datatype == "INT64":
            contents = oip.InferTensorContents(int64_contents=contents.int_contents)
        request.inputs.append(
            oip.ModelInferRequest.InferInputTensor(
                # One request holds one text: variable extents are 1.
                name=name,
                datatype=datatype,
                shape=[1 if extent < 0 else extent for extent in shape],
                contents=contents,
            )
        )


def _text_tensor(model: str, wanted: str, tensors: Iterable[oip.ModelMetadataResponse.TensorMetadata]) -> str:
    """The BYTES tensor of that name, or the only one; raises ValueError if there is neither."""
    tensors = list(tensors)
    texts = [each.name for each in tensors if each.datatype == "BYTES"]
    if wanted in texts:
        return wanted
    if len(texts) == 1:
        return texts[0]
    known = ", ".join(sorted(each.name for each in tensors)) or "none"
    raise ValueError(f"{model}: no BYTES tensor {wanted}; it has {known}")


def oip_piece(message: oip.ModelStreamInferResponse, text_output: str = TEXT_OUTPUT) -> Piece:
    """Decodes a message of an Open Inference stream.

    The protocol has no token counts: a message with text counts as one token, unless the final answer has the
    parameters `prompt_tokens` and `generated_tokens`.
    """
    piece = oip_answer(message.infer_response, text_output)
    is_last = _is_marked_last(message.infer_response)
    return replace(piece, is_last=is_last, error=message.error_message)


def oip_answer(response: oip.ModelInferResponse, text_output: str = TEXT_OUTPUT) -> Piece:
    """Decodes a unary answer; it counts tokens like a stream's message."""
    return Piece(
        tokens=int(any(_texts(response, text_output))),
        is_last=True,
        prompt_tokens=_count(response, "prompt_tokens"),
        generated_tokens=_count(response, "generated_tokens"),
    )


def _is_marked_last(response: oip.ModelInferResponse) -> bool:
    return FINAL_RESPONSE in response.parameters and response.parameters[FINAL_RESPONSE].bool_param


def _count(response: oip.ModelInferResponse, name: str) -> int | None:
    return response.parameters[name].int64_param if name in response.parameters else None


def status_in(error: str) -> tuple[str, str]:
    """Code and detail of an error message; some servers put the status name first, as in "[INTERNAL] …"."""
    if (match := _STATUS.match(error)) and match[1] in _CODES:
        return match[1], match[2]
    return IN_STREAM, error


def has_final_flag(message: oip.ModelStreamInferResponse) -> bool:
    """Whether the message has the final-response flag, set or not."""
    return FINAL_RESPONSE in message.infer_response.parameters


def _texts(response: oip.ModelInferResponse, text_output: str) -> Iterator[bytes]:
    for number, output in enumerate(response.outputs):
        if output.name == text_output:
            yield from output.contents.bytes_contents
            yield from _split(response.raw_output_contents[number : number + 1])


def _split(raw: Iterable[bytes]) -> Iterator[bytes]:
    for content in raw:
        at = 0
        while at < len(content):
            length = int.from_bytes(content[at : at + _LENGTH_BYTES], "little")
            at += _LENGTH_BYTES
            yield content[at : at + length]
            at += length

"""Messages of both protocols: what a prompt becomes, and what the messages that come back are taken for."""

from __future__ import annotations

import json

import pytest

from loadtest.core.records import IN_STREAM, Piece
from loadtest.core.wire import (
    WORDS,
    Sampling,
    TextModel,
    oip_answer,
    oip_piece,
    onward_answer,
    onward_facts,
    onward_piece,
    onward_request,
    onward_whole_request,
    status_in,
)
from loadtest.core.workload import Prompt
from onward.inference import open_inference_pb2 as oip
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2 as models

PROMPT = Prompt((4, 5, 4 + len(WORDS)), 7)


def metadata(*inputs: tuple[str, str, list[int]], output: str = "BYTES") -> oip.ModelMetadataResponse:
    tensor = oip.ModelMetadataResponse.TensorMetadata
    return oip.ModelMetadataResponse(
        name="m",
        inputs=[tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs],
        outputs=[tensor(name="text_output", datatype=output, shape=[-1])],
    )


def text(*, raw: bytes = b"", typed: list[bytes] | None = None, before: int = 0) -> oip.ModelStreamInferResponse:
    response = oip.ModelInferResponse()
    for number in range(before):
        response.outputs.append(oip.ModelInferResponse.InferOutputTensor(name=f"other{number}", datatype="FP32"))
        response.raw_output_contents.append(b"\0\0\0\0")
    contents = oip.InferTensorContents(bytes_contents=typed or [])
    output = oip.ModelInferResponse.InferOutputTensor(name="text_output", datatype="BYTES", contents=contents)
    response.outputs.append(output)
    if raw:
        response.raw_output_contents.append(raw)
    return oip.ModelStreamInferResponse(infer_response=response)


def test_a_prompt_in_our_own_contract_says_all_that_was_asked() -> None:
    request = onward_request(PROMPT, "r-1", "m", Sampling(temperature=0.5, ignore_eos=False))
    assert (request.request_id, request.model, list(request.token_ids.ids)) == ("r-1", "m", list(PROMPT.token_ids))
    assert (request.stopping.max_tokens, request.stopping.ignore_eos, request.sampling.temperature) == (7, False, 0.5)


def test_events_of_our_own_contract_are_tokens_or_the_end() -> None:
    response = pb.GenerateStreamResponse
    assert onward_piece(response(accepted=response.Accepted())) == Piece(0)
    assert onward_piece(response(delta=response.Delta(token_ids=[1, 2, 3]))) == Piece(3)
    # A character that is not whole yet: text of none, but a token.
    assert onward_piece(response(delta=response.Delta(text="", token_ids=[1]))) == Piece(1)
    assert onward_piece(response(finished=response.Finished())) == Piece(0)
    summary = response(summary=response.Summary(usage=pb.Usage(prompt_tokens=9, generated_tokens=3)))
    assert onward_piece(summary) == Piece(0, is_last=True, prompt_tokens=9, generated_tokens=3)


@pytest.mark.parametrize(("source", "expected"), [(0, 50), (40, 40)])
def test_prompts_of_an_encoder_decoder_are_of_its_source_s_vocabulary(source: int, expected: int) -> None:
    architecture = models.ModelArchitecture(vocab_size=50, source_vocab_size=source)
    response = models.GetModelResponse(
        model="m", architecture=architecture, limits=models.ModelLimits(max_batch_size=3)
    )
    facts = onward_facts(response)
    assert (facts.model, facts.vocab_size, facts.max_batch_size) == ("m", expected, 3)


def test_a_plain_text_model_gets_its_limits_as_parameters() -> None:
    request = TextModel.from_metadata(metadata(("text_input", "BYTES", [-1, 1]))).request(PROMPT, "r", Sampling(0.5))
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("text_input", "BYTES", [1, 1])
    assert tensor.contents.bytes_contents[0].decode().split() == [WORDS[4], WORDS[5], WORDS[4]]
    assert request.parameters["max_tokens"].int64_param == 7
    assert request.parameters["temperature"].double_param == 0.5
    assert request.parameters["ignore_eos"].bool_param is True
    assert request.parameters["triton_enable_empty_final_response"].bool_param is True


def test_a_model_that_declares_them_gets_its_limits_as_tensors() -> None:
    declared = (
        ("text_input", "BYTES", [1]),
        ("max_tokens", "INT32", [1]),
        ("temperature", "FP32", [1]),
        ("stream", "BOOL", [1]),
    )
    request = TextModel.from_metadata(metadata(*declared)).request(PROMPT, "r", Sampling(0.5))
    tensors = {tensor.name: tensor for tensor in request.inputs}
    assert list(tensors["max_tokens"].contents.int_contents) == [7]
    assert list(tensors["temperature"].contents.fp32_contents) == [0.5]
    assert list(tensors["stream"].contents.bool_contents) == [True]
    assert "max_tokens" not in request.parameters
    wide = TextModel.from_metadata(metadata(declared[0], ("max_tokens", "INT64", [1]))).request(PROMPT, "r", Sampling())
    assert list(wide.inputs[1].contents.int64_contents) == [7]


def test_a_model_with_sampling_parameters_gets_them_as_text_and_no_others() -> None:
    declared = (
        ("text_input", "BYTES", [1]),
        ("sampling_parameters", "BYTES", [1]),
        ("exclude_input_in_output", "BOOL", [1]),
    )
    request = TextModel.from_metadata(metadata(*declared)).request(PROMPT, "r", Sampling())
    tensors = {tensor.name: tensor for tensor in request.inputs}
    values = json.loads(tensors["sampling_parameters"].contents.bytes_contents[0])
    assert values == {"max_tokens": "7", "temperature": "0.0", "ignore_eos": True}
    assert list(tensors["exclude_input_in_output"].contents.bool_contents) == [True]
    assert set(request.parameters) == {"triton_enable_empty_final_response"}


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (metadata(("ids", "INT64", [1])), "m: no BYTES tensor text_input; it has ids"),
        (metadata(("text_input", "FP32", [1])), "no BYTES tensor text_input"),
        (metadata(("text_input", "BYTES", [1]), output="FP32"), "no BYTES tensor text_output"),
    ],
)
def test_a_model_that_is_not_one_for_text_is_refused(declared: oip.ModelMetadataResponse, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TextModel.from_metadata(declared)


@pytest.mark.parametrize(
    ("message", "tokens"),
    [
        (text(typed=[b"word"]), 1),
        (text(typed=[b""]), 0),
        (text(raw=b"\x04\0\0\0word"), 1),
        (text(raw=b"\0\0\0\0"), 0),
        (text(raw=b"\0\0\0\0\x01\0\0\0a"), 1),
        # The contents lie in the order of the outputs.
        (text(raw=b"\x04\0\0\0word", before=2), 1),
        (oip.ModelStreamInferResponse(), 0),
    ],
)
def test_a_message_with_text_is_one_token_however_the_text_is_laid_out(
    message: oip.ModelStreamInferResponse, tokens: int
) -> None:
    assert oip_piece(message).tokens == tokens


def test_a_text_model_may_call_its_tensors_as_it_likes_where_there_is_no_doubt() -> None:
    tensor = oip.ModelMetadataResponse.TensorMetadata
    declared = oip.ModelMetadataResponse(
        name="m",
        inputs=[tensor(name="args", datatype="BYTES", shape=[-1]), tensor(name="seed", datatype="INT64", shape=[1])],
        outputs=[tensor(name="output", datatype="BYTES", shape=[-1])],
    )
    model = TextModel.from_metadata(declared)
    (sent,) = model.request(PROMPT, "r", Sampling()).inputs
    assert (sent.name, sent.datatype) == ("args", "BYTES")
    contents = oip.InferTensorContents(bytes_contents=[b"word"])
    response = oip.ModelInferResponse(
        outputs=[oip.ModelInferResponse.InferOutputTensor(name="output", datatype="BYTES", contents=contents)]
    )
    assert oip_answer(response, model.text_output).tokens == 1
    assert oip_answer(response).tokens == 0
    declared.inputs.append(tensor(name="more", datatype="BYTES", shape=[-1]))
    with pytest.raises(ValueError, match="m: no BYTES tensor text_input; it has args, more, seed"):
        TextModel.from_metadata(declared)


def test_an_answer_that_comes_at_once_is_whole_and_its_tokens_are_counted() -> None:
    outputs = [pb.GenerationOutput(token_ids=[1, 2, 3]), pb.GenerationOutput(token_ids=[4])]
    answer = pb.GenerateResponse(outputs=outputs, usage=pb.Usage(prompt_tokens=9, generated_tokens=4))
    assert onward_answer(answer) == Piece(4, is_last=True, prompt_tokens=9, generated_tokens=4)
    whole = onward_whole_request(PROMPT, "r-1", "m", Sampling(temperature=0.5))
    streamed = onward_request(PROMPT, "r-1", "m", Sampling(temperature=0.5))
    assert isinstance(whole, pb.GenerateRequest)
    assert whole.SerializeToString(deterministic=True) == streamed.SerializeToString(deterministic=True)
    declared = metadata(("text_input", "BYTES", [1]), ("stream", "BOOL", [1]))
    request = TextModel.from_metadata(declared).request(PROMPT, "r", Sampling(), is_streamed=False)
    assert list(request.inputs[1].contents.bool_contents) == [False]
    assert "triton_enable_empty_final_response" not in request.parameters
    response = text(typed=[b"two words"]).infer_response
    response.parameters["generated_tokens"].int64_param = 2
    assert oip_answer(response) == Piece(1, is_last=True, generated_tokens=2)


def test_token_counts_of_the_final_answer_are_used() -> None:
    message = text(typed=[b"two words"])
    assert (oip_piece(message).prompt_tokens, oip_piece(message).generated_tokens) == (None, None)
    message.infer_response.parameters["prompt_tokens"].int64_param = 5
    message.infer_response.parameters["generated_tokens"].int64_param = 0
    assert (oip_piece(message).prompt_tokens, oip_piece(message).generated_tokens) == (5, 0)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("no such model", IN_STREAM, "no such model"),
        ("[RESOURCE_EXHAUSTED] full; retry\nlater", "RESOURCE_EXHAUSTED", "full; retry\nlater"),
        ("[OK] indeed", IN_STREAM, "[OK] indeed"),
        ("[OUTPUT] is wrong", IN_STREAM, "[OUTPUT] is wrong"),
    ],
)
def test_an_error_in_a_stream_has_its_own_code_where_it_names_one(error: str, code: str, words: str) -> None:
    assert oip_piece(oip.ModelStreamInferResponse(error_message=error)).error == error
    assert status_in(error) == (code, words)

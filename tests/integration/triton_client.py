"""What an unmodified `tritonclient.grpc` sees of a server. Run as a program: `triton_client.py HOST:PORT MODEL`.

In a process of its own, since its generated messages have the names of ours. Prints one JSON object.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

TEXT = "3 May"


def text_input(*texts: str, name: str = "text_input", datatype: str = "BYTES") -> triton.InferInput:
    """A tensor of texts."""
    tensor = triton.InferInput(name, [len(texts)], datatype)
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
    return tensor


def texts_of(result: Any) -> list[str]:
    """A result's texts."""
    found = result.as_numpy("text_output")
    return [] if found is None else [each.decode() for each in found]


def refusal(call: Any) -> list[str | None]:
    """The status and words of a call that must fail."""
    try:
        call()
    except InferenceServerException as error:
        return [error.status(), error.message()]
    return [None, "it was answered"]


def managed(act: Any, client: Any, model: str) -> bool | list[str | None]:
    """Whether a model is ready after what was done to it, or the status and words with which that was refused."""
    try:
        act(model)
    except InferenceServerException as error:
        return [error.status(), error.message()]
    return bool(client.is_model_ready(model))


def streamed(client: Any, requests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Answers by request id, of requests that run in one stream together."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for request_id, keywords in requests.items():
        client.async_stream_infer(request_id=request_id, **keywords)
    found: dict[str, Any] = {name: {"pieces": [], "finals": [], "errors": []} for name in requests}
    left = set(requests)
    while left:
        result, error = answers.get(timeout=60)
        if error is not None:
            # The client keeps an error's words and not its answer's id: only one request of these may fail.
            (name,) = (each for each in left if each.startswith("bad"))
            found[name]["errors"].append(error.message())
            left.discard(name)
            continue
        response = result.get_response()
        one = found[response.id]
        one["pieces"] += texts_of(result)
        final = response.parameters["triton_final_response"].bool_param
        one["finals"].append(final)
        if final:
            one["outputs_of_last"] = len(response.outputs)
            one["finish_reason"] = response.parameters["finish_reason"].string_param
            left.discard(response.id)
    client.stop_stream()
    return found


def main(target: str, model: str) -> dict[str, Any]:
    """Everything a client does."""
    client = triton.InferenceServerClient(target)
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    result = client.infer(model, [text_input(TEXT)], request_id="one", parameters=greedy)
    metadata = client.get_model_metadata(model)
    several = client.infer(
        model,
        [text_input(TEXT)],
        outputs=[triton.InferRequestedOutput("text_output")],
        parameters={"n": 3, "seed": 5, "max_tokens": 4, "stop": '["zz"]', "logit_bias": '{"7": -1.5}', "top_p": "0.9"},
        client_timeout=60,
    )
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "unknown_ready": client.is_model_ready("unknown"),
        "server": [client.get_server_metadata().name, list(client.get_server_metadata().extensions)],
        "inputs": [[each.name, each.datatype, list(each.shape)] for each in metadata.inputs],
        "outputs": [[each.name, each.datatype, list(each.shape)] for each in metadata.outputs],
        "index": [[each.name, each.state] for each in client.get_model_repository_index().models],
        "text": texts_of(result),
        "id": result.get_response().id,
        "usage": {
            name: value.int64_param or value.string_param for name, value in result.get_response().parameters.items()
        },
        "several": texts_of(several),
        "stream": streamed(
            client,
            {
                "plain": {"model_name": model, "inputs": [text_input(TEXT)], "parameters": greedy},
                "empty": {
                    "model_name": model,
                    "inputs": [text_input(TEXT)],
                    "parameters": greedy,
                    "enable_empty_final_response": True,
                },
                "bad": {"model_name": model, "inputs": [text_input(TEXT)], "parameters": {"top_p": 7}},
            },
        ),
        "refusals": {
            "unknown model": refusal(lambda: client.infer("unknown", [text_input(TEXT)])),
            "unknown version": refusal(lambda: client.infer(model, [text_input(TEXT)], model_version="2")),
            "wrong dtype": refusal(
                lambda: client.infer(
                    model, [triton.InferInput("text_input", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))]
                )
            ),
            "wrong shape": refusal(lambda: client.infer(model, [text_input(TEXT, TEXT)])),
            "missing input": refusal(lambda: client.infer(model, [text_input(TEXT, name="text")])),
            "unknown output": refusal(
                lambda: client.infer(model, [text_input(TEXT)], outputs=[triton.InferRequestedOutput("logits")])
            ),
            "unknown parameter": refusal(lambda: client.infer(model, [text_input(TEXT)], parameters={"warmth": 1})),
            "parameter beyond its limit": refusal(
                lambda: client.infer(model, [text_input(TEXT)], parameters={"top_p": "1.5"})
            ),
            "parameter of another type": refusal(
                lambda: client.infer(model, [text_input(TEXT)], parameters={"max_tokens": "many"})
            ),
            "no such method": refusal(lambda: client.get_inference_statistics(model)),
        },
        "unload": managed(client.unload_model, client, model),
        "load": managed(client.load_model, client, model),
        "text_again": texts_of(client.infer(model, [text_input(TEXT)], parameters=greedy)),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

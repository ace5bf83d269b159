"""Attention weights: the reference's explain the heads' outputs, the explain graph's and a server's are the same.

The reference's weights are checked against the model's own heads: weights times values are the heads' outputs. So no
layer, head, kind or axis can be swapped on the way.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from benchmarks.frame.servers import serving
from export.__main__ import main
from export.emit import EmitError, emit, share_weights
from export.explain import ExplainGraph
from export.verify import Verdict, verify
from lessons import command as lesson_command
from model.nn import reference
from model.nn.attention import CrossAttention, SelfAttention
from model.nn.transformer import Transformer
from model.spec import artifact
from model.spec.artifact import DECODER, ENCODER, AttentionKind, Precision, attention_output
from model.spec.config import ModelConfig
from model.spec.golden_attention import ATTENTION_TOLERANCES, ROW_SUM_TOLERANCE
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.commands.explain import explain
from service.config import ExplainConfig
from service.engine import factory
from service.engine.scheduler import EngineLimits
from service.engine.sessions.attention import load_attention_graph
from service.engine.sessions.session import GraphSession, SessionOptions
from service.errors import NotServing
from service.transport.analysis_codec import ATTENTION_KINDS
from tests.artifacts import ADDITIVE, random_model, rehash, tiny_artifact, tiny_checkpoint, tiny_config

Float64 = npt.NDArray[np.float64]
Weights = dict[str, npt.NDArray[np.floating[Any]]]

FAMILIES = ("decoder-only", "encoder-decoder")
# Besides those that are served below: every kind of position, both scores, grouped heads and not, norms before and
# after. One layer suffices: the served ones have two.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "learned": (
        "decoder-only",
        {"positions": "learned", "norm": "layernorm", "norm_placement": "post", "activation": "gelu"}
        | {"num_heads": 4, "num_kv_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_embeddings": False}
        | {"num_layers": 1},
    ),
    "encoder": (
        "encoder-decoder",
        {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "num_heads": 4, "num_kv_heads": 2}
        | {
            "rope_theta": 500.0,
            "head_dim": 16,
            "scale_embeddings": True,
            "source_vocab_size": 301,
            "num_encoder_layers": 1,
            "num_layers": 1,
        },
    ),
    # The second layer of two, so that a window is not taken for every layer's.
    "windowed": (
        "decoder-only",
        {"num_layers": 2, "sliding_window": 7, "layer_types": ("full", "sliding"), "num_heads": 4, "head_dim": 16},
    ),
    "additive-decoder-only": ("decoder-only", {**ADDITIVE["decoder-only"]}),
    "additive-encoder-decoder": ("encoder-decoder", {**ADDITIVE["encoder-decoder"]}),
}


def tokens(config: ModelConfig, *, length: int = 23, source_length: int = 14) -> tuple[list[int], list[int]]:
    """A sequence and its source, empty for a decoder-only model; a served sequence would begin with the start token."""
    rng = np.random.default_rng(0)
    sequence = rng.integers(3, config.vocab_size, length).tolist()
    if not config.is_encoder_decoder:
        return sequence, []
    sequence[0] = config.bos_id
    return sequence, rng.integers(3, config.source_vocab_size, source_length).tolist()


def assert_explains_outputs(model: Transformer, weights: Weights, sequence: list[int], source: list[int]) -> None:
    """Each layer's weights times its values are what its heads put out in a run of the model."""
    inputs: dict[nn.Module, torch.Tensor] = {}
    outputs: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, given: tuple[torch.Tensor], output: torch.Tensor) -> None:
        inputs[module], outputs[module] = given[0].detach()[0], output.detach()[0]

    modules = dict(model.named_modules())
    hooks = [module.register_forward_hook(keep) for module in modules.values() if isinstance(module, nn.Linear)]
    reference.logits(model, sequence, source or None)
    for hook in hooks:
        hook.remove()
    group, size = model.config.num_heads // model.config.num_kv_heads, model.config.head_dim
    checked = set()
    for name, module in modules.items():
        if isinstance(module, CrossAttention):
            kind, packed = AttentionKind.CROSS, outputs[module.key_value]
        elif isinstance(module, SelfAttention):
            kind = AttentionKind.ENCODER if name.startswith("encoder.") else AttentionKind.DECODER
            packed = outputs[module.qkv]
        else:
            continue
        values = packed[:, -model.config.num_kv_heads * size :].unflatten(1, (-1, size)).transpose(0, 1)
        output = attention_output(kind, int(name.split("layers.")[1].split(".")[0]))
        heads = torch.from_numpy(weights[output]) @ values.repeat_interleave(group, dim=0)
        torch.testing.assert_close(heads.transpose(0, 1).flatten(1), inputs[module.output], atol=1e-4, rtol=1e-4)
        checked.add(output)
    assert checked == weights.keys()


def by_reference(model: Transformer, sequence: list[int], source: list[int]) -> Weights:
    found = reference.attention(model, sequence, source or None)
    return {
        attention_output(kind, layer): tensor.numpy()
        for kind, tensors in found.items()
        for layer, tensor in enumerate(tensors)
    }


def by_graph(path: Path, sequence: list[int], source: list[int]) -> Weights:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": np.array([sequence])} | ({"source_ids": np.array([source])} if source else {})
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def assert_attention(found: Weights, expected: Weights, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, weights in found.items():
        assert weights.shape == expected[name].shape, name
        np.testing.assert_allclose(weights, expected[name], atol=tolerance, err_msg=name)
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=ROW_SUM_TOLERANCE, err_msg=name)
        if name.startswith("decoder_"):
            assert not np.triu(weights, k=1).any(), f"{name} looks ahead"
            assert np.array_equal(weights[:, 0, 0], np.ones(len(weights)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sampled(1)
def test_weights_of_the_reference_explain_the_heads_and_are_the_graphs(shape: str, tmp_path: Path) -> None:
    family, values = SHAPES[shape]
    config = tiny_config(family, **values)
    model = random_model(config)
    sequence, source = tokens(config)
    expected = by_reference(model, sequence, source)
    assert max(weights.max() for weights in expected.values()) > 3 / len(sequence), "attention that is hardly any"
    assert_explains_outputs(model, expected, sequence, source)
    emit(ExplainGraph(model), tmp_path / "explain.onnx")
    assert_attention(by_graph(tmp_path / "explain.onnx", sequence, source), expected, 1e-5)
    assert_attention(
        by_graph(tmp_path / "explain.onnx", sequence[:1], source[:1]),
        by_reference(model, sequence[:1], source[:1]),
        1e-5,
    )


# Two layers of each kind, except an encoder-decoder's decoder.
SIZES: dict[str, dict[str, int]] = {"decoder-only": {}, "encoder-decoder": {"num_layers": 1}}


def explained(family: str, precision: Precision = Precision.FP32) -> Path:
    """An artifact with an explain graph."""
    return tiny_artifact(family, precision, explain_graph=True, **SIZES[family])


def explained_model(family: str) -> Transformer:
    """What it was exported from."""
    return random_model(tiny_config(family, **SIZES[family]))


def external_places(path: Path) -> dict[str, dict[str, str]]:
    """Where the weights of a graph lie: file, offset and length by name."""
    graph = onnx.load(path, load_external_data=False).graph
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in graph.initializer
        if tensor.external_data
    }


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("decoder-only", Precision.FP32),
        ("encoder-decoder", Precision.FP32),
        ("encoder-decoder", Precision.INT8),
        ("decoder-only", Precision.INT4),
    ],
)
@pytest.mark.sampled(1)
def test_explain_graph_has_no_weights_of_its_own_and_is_proven(family: str, precision: Precision) -> None:
    folder = explained(family, precision)
    assert not (folder / "explain.onnx.data").exists()
    assert (folder / "explain.onnx").stat().st_size < 60_000, "only what is not a weight"
    others = [
        external_places(folder / f"{name}.onnx") for name in (DECODER, ENCODER) if (folder / f"{name}.onnx").exists()
    ]
    places = external_places(folder / "explain.onnx")
    assert places
    for name, place in places.items():
        assert place in [other.get(name) for other in others], name
    if precision is not Precision.FP32:
        assert sum(name.endswith(f"_{precision}") for name in places) >= 3, "products are as rounded as the decoder's"
    last = artifact.load(folder).config.num_layers - 1
    names = {tensor.name for tensor in onnx.load(folder / "explain.onnx", load_external_data=False).graph.initializer}
    assert not any(name.startswith((f"layers.{last}.feed_forward", "final_norm", "head")) for name in names)
    report = verify(folder, lambda _: None)
    assert report.verdict is Verdict.PASSED
    tolerance = ATTENTION_TOLERANCES[precision]
    written = json.loads((folder / artifact.PARITY).read_text())["attention"]
    assert [case["name"] for case in written] == [case.name for case in report.attention]
    assert len(written) == 3
    for case, values in zip(report.attention, written, strict=True):
        assert values["tolerance"] == dataclasses.asdict(tolerance)
        assert values["verdict"] == "passed"
        assert case.max_row_sum_error < 1e-6
        assert not case.looks_ahead
    distances = [case.relative_distance for case in report.attention]
    if precision is Precision.FP32:
        assert max(case.max_abs_error for case in report.attention) < 2e-6
    else:
        assert max(distances) > ATTENTION_TOLERANCES[Precision.FP32].relative, "nothing was rounded"


def test_explain_graph_is_refused_beside_rounded_keys(tmp_path: Path, capsys: Any) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", tiny_config("decoder-only"))
    flags = ["--out", str(tmp_path / "out"), "--explain-graph", "--kv-cache", "int8"]
    assert main([str(source), *flags]) == 2
    problems = json.loads(capsys.readouterr().out.splitlines()[-1])["problems"]
    assert problems == ["an explain graph is for fp32 K/V, asked for is int8"]


def other_models_graph(tmp_path: Path) -> Path:
    """An artifact whose explain graph alone is of other weights, with checksums that say all is well."""
    folder = tmp_path / "artifact"
    shutil.copytree(explained("decoder-only"), folder)
    emit(ExplainGraph(random_model(tiny_config("decoder-only"), seed=1)), folder / "explain.onnx")
    with pytest.raises(EmitError, match=r"is not the same in decoder\.onnx"):
        share_weights(folder / "explain.onnx", folder / "decoder.onnx")
    manifest = artifact.read_manifest(folder)
    files = {**manifest.files, "explain.onnx.data": artifact.hash_file(folder / "explain.onnx.data")}
    (folder / artifact.MANIFEST).write_text(dataclasses.replace(manifest, files=files).to_json())
    rehash(folder)
    return folder


def test_another_models_graph_fails_its_proof_at_verify_and_in_the_server(tmp_path: Path) -> None:
    folder = other_models_graph(tmp_path)
    report = verify(folder, lambda _: None)
    assert report.verdict is Verdict.FAILED
    # The first case is one token, which has but itself to look at.
    assert report.failed == ("attention-17", "attention-96")
    with pytest.raises(NotServing, match="does not answer as its golden cases say"):
        load_attention_graph(folder, artifact.load(folder))


def test_an_artifact_that_was_replaced_after_the_start_explains_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(explained("decoder-only"), folder)
    served = artifact.load(folder)
    load_attention_graph(folder, served)
    manifest = dataclasses.replace(served, training={"steps": 7})
    (folder / artifact.MANIFEST).write_text(manifest.to_json())
    with pytest.raises(NotServing, match="has changed on the disk"):
        load_attention_graph(folder, served)
    (folder / artifact.MANIFEST).write_text(served.to_json())
    (folder / artifact.GOLDEN_ATTENTION).write_bytes(b"other cases")
    with pytest.raises(NotServing, match="has changed on the disk"):
        load_attention_graph(folder, served)


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_loads_the_graphs_that_it_steps_and_no_other(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    class Counted(GraphSession):
        def __init__(self, folder: Path, spec: Any, *rest: Any) -> None:
            loaded.append(spec.file)
            super().__init__(folder, spec, *rest)

    monkeypatch.setattr(factory, "GraphSession", Counted)
    folder = explained(family)
    factory.build_runner(
        folder, artifact.load(folder), EngineLimits(max_batch_size=2), SessionOptions(intra_op_threads=1)
    )
    expected = {"decoder.onnx"} | ({"encoder.onnx"} if family == "encoder-decoder" else set())
    assert set(loaded) == expected


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of both families."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        (folder / family).symlink_to(explained(family), target_is_directory=True)
    with serving(folder, "--no-metrics", "--threads", "1", "--log-level", "warning") as target:
        yield target


def matrices_of(answer: pb.ExplainResponse) -> Weights:
    """A response's matrices, stacked by kind and layer as the graph has them."""
    kinds = {number: kind for kind, number in ATTENTION_KINDS.items()}
    heads: dict[str, list[npt.NDArray[np.float32]]] = {}
    for each in answer.attentions:
        matrices = heads.setdefault(attention_output(kinds[each.kind], each.layer), [])
        assert each.head == len(matrices)
        matrices.append(np.array(each.weights, np.float32).reshape(each.rows, each.columns))
    return {name: np.stack(matrices) for name, matrices in heads.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_served_weights_are_pytorchs_over_the_greedy_output(target: str, family: str) -> None:
    model = explained_model(family)
    config = model.config
    with grpc.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        prompt = list(stub.Tokenize(pb.TokenizeRequest(model=family, text="3 May")).token_ids)
        answer = stub.Explain(pb.ExplainRequest(model=family, text="3 May"))
        sampling, stopping = pb.SamplingParams(temperature=0.0), pb.StoppingParams(max_tokens=len(answer.target_tokens))
        request = pb.GenerateRequest(model=family, text="3 May", sampling=sampling, stopping=stopping)
        generated = list(stub.Generate(request).outputs[0].token_ids)
        ids = pb.TokenIds(ids=generated)
        assert stub.Explain(pb.ExplainRequest(model=family, text="3 May", target_token_ids=ids)) == answer
    assert len(generated) == len(answer.target_tokens) > 5
    sequence = [config.bos_id, *generated[:-1]] if config.is_encoder_decoder else [*prompt, *generated[:-1]]
    source = prompt if config.is_encoder_decoder else []
    assert len(answer.decoder_tokens) == len(sequence)
    assert list(answer.prompt_tokens) == [*"3␣May".replace("␣", "Ġ"), "<eos>"] if source else ["<bos>", *"3ĠMay"]
    found = matrices_of(answer)
    assert_attention(found, by_reference(model, sequence, source), 1e-5)
    assert_explains_outputs(model, found, sequence, source)


def test_explain_command_draws_what_the_server_answers(target: str, tmp_path: Path) -> None:
    page, picture = tmp_path / "out.html", tmp_path / "out.svg"
    out, err = io.StringIO(), io.StringIO()
    config = ExplainConfig(
        model="encoder-decoder",
        text="<b>3",
        target=target,
        target_text="4>",
        html=page,
        svg=picture,
        layers=(0,),
        heads=(0,),
    )
    assert explain(config, out, err) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<figure>") == 3
    assert "<code>&lt;b&gt;3</code>" in text
    assert "<code>4&gt;</code>" in text
    assert ">b</text>" in picture.read_text(encoding="utf-8")
    wrong = dataclasses.replace(config, layers=(9,))
    assert explain(wrong, out, err) == 1
    assert err.getvalue() == "INVALID_ARGUMENT: layers[0]: must be below 2, the number of layers, got 9\n"


def test_served_lesson_draws_the_three_kinds_of_a_live_request(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["encoder-decoder", "--served", "encoder-decoder", "--target", target, "--text", "3 May"]
    assert lesson_command.main([*asked, "--out", str(tmp_path)]) == 0
    picture = (tmp_path / "encoder-decoder-served.svg").read_text(encoding="utf-8")
    assert all(kind in picture for kind in (">cross-attention<", ">encoder<", ">decoder, causal<"))
    out = capsys.readouterr().out
    assert "It read “3 May” and wrote" in out
    assert "alignment: where cross-attention is strongest" in out
    asked[2] = "decoder-only"
    assert lesson_command.main([*asked, "--out", str(tmp_path)]) == 0
    assert ">cross-attention<" not in (tmp_path / "encoder-decoder-served.svg").read_text(encoding="utf-8")

"""Worked examples: torch and ONNX Runtime both give what NumPy gives.

Every computation is one of the model's own functions or modules. It runs twice: in torch, and exported by
`torch.onnx.export` in ONNX Runtime. Where ONNX has an operator of its own for the same thing, that is asked too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from export.additive import additive_scores
from lessons.notes import MONEY_POSITION, NOTES, ON_YOUR_LIFE
from lessons.runtime import Computation, run_graph, run_onnx_runtime
from model.nn.attention import (
    AdditiveScore,
    CrossAttention,
    SelfAttention,
    attend,
    attention_weights,
    causal_mask,
    dot_scores,
    join_heads,
    split_heads,
)
from model.nn.layers import EncoderLayer, FeedForward
from model.nn.positions import SinusoidalPositions, base_frequencies, rotary_tables, rotate
from model.nn.transformer import Embedding
from model.spec.config import Activation, Architecture, ModelConfig, Norm, NormPlacement, Positions
from tests.parity import worked_examples as formulas

Arrays = tuple[np.ndarray, ...]
Run = Callable[..., np.ndarray]
TOLERANCE = 1e-5


def run_torch(module: nn.Module, *inputs: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return module.eval()(*map(torch.from_numpy, inputs)).numpy()


def run_operator(operator: str, *inputs: np.ndarray, num_outputs: int = 1, take: int = 0, **attributes) -> np.ndarray:
    """One operator of ONNX's own, opset 23; `take` picks which of its outputs is wanted."""
    names = [f"input_{index}" for index in range(len(inputs))]
    outputs = [f"output_{index}" for index in range(num_outputs)]
    graph = helper.make_graph(
        [helper.make_node(operator, names, outputs, **attributes)],
        operator,
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names, inputs, strict=True)
        ],
        [helper.make_tensor_value_info(outputs[take], TensorProto.FLOAT, None)],
    )
    return run_graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), inputs)


@pytest.fixture(params=[run_torch, run_onnx_runtime], ids=["torch", "onnxruntime"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


def floats(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def one_head(x: np.ndarray) -> np.ndarray:
    """`[S, D]` float64 → `[1, 1, S, D]` float32."""
    return x.astype(np.float32)[None, None]


def make_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": Architecture.DECODER_ONLY,
        "vocab_size": 8,
        "context": 16,
        "d_model": 64,
        "num_layers": 1,
        "num_heads": 8,
        "d_ff": 96,
        "positions": Positions.SINUSOIDAL,
        "norm": Norm.LAYER,
        "norm_placement": NormPlacement.POST,
        "activation": Activation.RELU,
    }
    return ModelConfig(**values | changes)


def randomize(module: nn.Module) -> nn.Module:
    """Draws every parameter, biases and norms too, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return module


def weight(linear: nn.Linear) -> np.ndarray:
    """The notes' W, `[inputs, outputs]`; torch stores its transpose."""
    return linear.weight.detach().numpy().T.astype(np.float64)


def vector(parameter: Tensor) -> np.ndarray:
    return parameter.detach().numpy().astype(np.float64)


def attend_to_itself(module: SelfAttention, x: Tensor) -> Tensor:
    return join_heads(attend(*module.split(module.project(x))))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layer = EncoderLayer(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, attend_to_itself)


# 1. Queries, keys, values; word by word, and as one matrix expression.


def test_one_matrix_expression_is_the_word_by_word_computation(run: Run) -> None:
    x = floats(5, 512)
    w_q, w_k, w_v = (floats(512, 64, seed=seed, scale=0.06) for seed in (1, 2, 3))
    q, k, v = (one_head(x @ w) for w in (w_q, w_k, w_v))
    assert (x[:1] @ w_q).shape == (x[:1] @ w_k).shape == (x[:1] @ w_v).shape == (1, 64)

    expected = formulas.attention_word_by_word(*(array.astype(np.float64) for array in (x, w_q, w_k, w_v)))
    np.testing.assert_allclose(run(Computation(attend), q, k, v)[0, 0], expected, atol=TOLERANCE)
    np.testing.assert_allclose(run_operator("Attention", q, k, v)[0, 0], expected, atol=TOLERANCE)


# 2. "Show me the money"


def test_sinusoids_are_the_papers_in_radians(run: Run) -> None:
    narrow, wide = (run(SinusoidalPositions(40, width), np.arange(40)) for width in (4, 64))
    for table in (narrow, wide):
        expected = np.stack([formulas.position_vector(position, table.shape[1]) for position in range(40)])
        np.testing.assert_allclose(table, expected, atol=1e-6)
    np.testing.assert_allclose(narrow[1], formulas.POSITION_1_IN_RADIANS, atol=0.000501)


def test_money_enters_as_its_embedding_plus_its_position(run: Run) -> None:
    config = make_config(d_model=4, num_heads=1)
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    with torch.no_grad():
        tokens.weight[5] = torch.from_numpy(NOTES.show_me_embeddings[MONEY_POSITION])
    entered = run(Embedding(config, tokens, config.context), np.array([[2, 3, 4, 5]]))
    expected = NOTES.show_me_embeddings[MONEY_POSITION] + formulas.position_vector(MONEY_POSITION, 4)
    np.testing.assert_allclose(entered[0, MONEY_POSITION], expected, atol=1e-6)


def test_rotary_positions_are_those_of_the_onnx_operator(run: Run) -> None:
    x = floats(2, 4, 9, 16)
    cos, sin = (table.numpy() for table in rotary_tables(9, base_frequencies(16, 10000.0)))
    turned = run(Computation(rotate), x, cos, sin)
    position_ids = np.tile(np.arange(9), (2, 1))
    np.testing.assert_allclose(turned, run_operator("RotaryEmbedding", x, cos, sin, position_ids), atol=TOLERANCE)


# 3. The mask.


def test_masked_words_get_exactly_no_attention(run: Run) -> None:
    def weights_of(q: Tensor, k: Tensor) -> Tensor:
        return attention_weights(dot_scores(q, k), causal_mask(q.shape[-2]))

    length, width = len(ON_YOUR_LIFE), NOTES.head_width
    q = np.zeros((length, width))
    q[:, :length] = NOTES.on_your_life_scores
    k, v = np.eye(length, width), floats(length, width).astype(np.float64)
    masked = NOTES.on_your_life_scores + formulas.mask_above_diagonal(length)
    expected = formulas.softmax(masked / np.sqrt(width))

    own = run(Computation(weights_of), one_head(q), one_head(k))[0, 0]
    operator = run_operator(
        "Attention",
        *map(one_head, (q, k, v)),
        num_outputs=4,
        take=3,
        is_causal=1,
        qk_matmul_output_mode=3,
    )[0, 0]
    for weights in (own, operator):
        np.testing.assert_allclose(weights, expected, atol=TOLERANCE)
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
        assert (weights[np.triu_indices(length, k=1)] == 0.0).all()
        assert (weights[np.tril_indices(length)] > 0.0).all()
    on = ON_YOUR_LIFE.index("on")
    unseen = [ON_YOUR_LIFE.index(word) for word in ("your", "life", "<end>")]
    assert own[on, unseen].tolist() == [0.0, 0.0, 0.0]

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, is_causal=True)

    output = run(Computation(causal), *map(one_head, (q, k, v)))[0, 0]
    np.testing.assert_allclose(
        output, formulas.attention(q, k, v, formulas.mask_above_diagonal(length)), atol=TOLERANCE
    )


# 4. Heads, norms, residuals, feed-forward networks.


def heads_of(attention: SelfAttention) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Each head's own W^Q, W^K, W^V, cut from the fused projection."""
    columns = np.split(weight(attention.qkv), attention.qkv.out_features // attention.head_dim, axis=1)
    count = len(columns) // 3
    return list(zip(columns[:count], columns[count : 2 * count], columns[2 * count :], strict=True))


def feed_forward_oracle(module: FeedForward, x: np.ndarray) -> np.ndarray:
    return formulas.feed_forward(
        x, weight(module.up), vector(module.up.bias), weight(module.down), vector(module.down.bias)
    )


def test_a_layer_normalises_each_sum_of_input_and_sublayer(run: Run) -> None:
    module = randomize(Layer(make_config(mlp_bias=True)))
    layer = module.layer
    x = floats(1, 7, 64)

    def add_and_norm(norm: nn.LayerNorm, x: np.ndarray, branch: np.ndarray) -> np.ndarray:
        return formulas.layer_norm(x + branch, vector(norm.weight), vector(norm.bias), norm.eps)

    attention = formulas.multi_head(x[0], heads_of(layer.self_attention), weight(layer.self_attention.output))
    hidden = add_and_norm(layer.self_attention_residual.norm, x[0], attention)
    expected = add_and_norm(layer.feed_forward_residual.norm, hidden, feed_forward_oracle(layer.feed_forward, hidden))
    np.testing.assert_allclose(run(module, x)[0], expected, atol=10 * TOLERANCE)


# 5. Additive scores.


def test_additive_scores_are_the_formula_term_by_term(run: Run) -> None:
    score = randomize(AdditiveScore(make_config(num_heads=2, head_dim=7)))
    q, k, v = floats(2, 2, 5, 7, seed=1), floats(2, 2, 6, 7, seed=2), vector(score.vector)
    rows = [[formulas.additive_scores(q[b, h], k[b, h], v[h]) for h in range(2)] for b in range(2)]
    np.testing.assert_allclose(run(score, q, k), rows, atol=TOLERANCE)
    # As graphs have it, laid out in another way.
    in_graphs = Computation(partial(additive_scores, score.vector.detach()))
    np.testing.assert_allclose(run(in_graphs, q, k), rows, atol=TOLERANCE)


def test_cross_attention_with_additive_scores_aligns_as_bahdanau_does(run: Run) -> None:
    config = make_config(architecture=Architecture.ENCODER_DECODER, num_encoder_layers=1, num_heads=1, head_dim=64)
    module = randomize(CrossAttention(dataclasses.replace(config, attention_score="additive")))
    w_a, u_a, w_v = weight(module.query).T, weight(module.key_value).T[:64], weight(module.key_value).T[64:]
    states, annotations = floats(3, 64, seed=1), floats(6, 64, seed=2)

    def align(s: Tensor, h: Tensor) -> Tensor:
        k, v = module.project_memory(h)
        return attend(split_heads(module.project_query(s), 64), k, v, score=module.score)

    alignment, context = formulas.align_and_translate(
        states.astype(np.float64), annotations.astype(np.float64), w_a, u_a, vector(module.score.vector)[0]
    )
    assert alignment.max() > 2 / 6, "an alignment that is hardly any proves nothing"
    found = run(Computation(align), states[None], annotations[None])[0, 0]
    np.testing.assert_allclose(found, context @ w_v.T, atol=10 * TOLERANCE)

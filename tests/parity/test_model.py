"""The transformers in torch: every combination works, attention is its formula, neither future nor padding leaks."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.nn import reference
from model.nn.attention import (
    AdditiveScore,
    Attend,
    attend,
    attend_fused,
    causal_mask,
    dot_scores,
    padding_mask,
    window_mask,
)
from model.nn.layers import DecoderLayer, FeedForward, GatedFeedForward, Residual
from model.nn.positions import base_frequencies, rotary_frequencies, rotary_tables, sinusoidal_table
from model.nn.transformer import DecoderOnly, EncoderDecoder, Transformer, build, build_empty
from model.spec.config import Activation, Architecture, AttentionScore, ModelConfig, Norm, NormPlacement, Positions
from model.training.config import TrainConfig
from model.training.optimizers import make_optimizers


def make_config(architecture: Architecture = Architecture.DECODER_ONLY, **changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": architecture,
        "vocab_size": 23,
        "context": 16,
        "d_model": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "d_ff": 24,
    }
    if architecture is Architecture.ENCODER_DECODER:
        values |= {"num_encoder_layers": 2, "source_vocab_size": 19, "source_context": 12}
    return ModelConfig(**values | changes)


def rotary_config(scaling: str, head_dim: int = 16, **changes: object) -> ModelConfig:
    return make_config(rope_theta=500.0, rope_scaling=scaling, head_dim=head_dim, **changes)


def make_model(config: ModelConfig) -> Transformer:
    """Weights of unit effect: a fresh model's are so small that a leak could hide below any tolerance."""
    model = build(config, seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model


def draw_ids(*shape: int, high: int = 19, seed: int = 0) -> Tensor:
    return torch.randint(3, high, shape, generator=torch.Generator().manual_seed(seed))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(model: Transformer, target_ids: Tensor, source_ids: Tensor | None = None) -> Tensor:
    if isinstance(model, DecoderOnly):
        return model(target_ids)
    source_ids = draw_ids(len(target_ids), 5) if source_ids is None else source_ids
    return model(source_ids, torch.full((len(source_ids),), source_ids.shape[1]), target_ids)


# Attention


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masking", ["none", "causal", "padding", "causal and padding"])
def test_fused_attention_is_the_formula(num_kv_heads: int, masking: str) -> None:
    q, k, v = draw(3, 4, 9, 8), draw(3, num_kv_heads, 9, 8, seed=1), draw(3, num_kv_heads, 9, 8, seed=2)
    mask = padding_mask(torch.tensor([9, 1, 4]), 9) if "padding" in masking else None
    is_causal = "causal" in masking
    torch.testing.assert_close(
        attend_fused(q, k, v, mask, is_causal=is_causal),
        attend(q, k, v, mask, is_causal=is_causal),
        atol=1e-6,
        rtol=1e-5,
    )


@pytest.mark.parametrize("kind", ["dot products unscaled", "additive"])
def test_fused_attention_with_a_score_it_has_no_kernel_for_is_the_formula(kind: str) -> None:
    score = AdditiveScore(make_config(head_dim=8)) if kind == "additive" else partial(dot_scores, scale=1.0)
    if isinstance(score, AdditiveScore):
        score.vector.data.copy_(draw(4, 8, seed=3))
    q, k, v = draw(3, 4, 9, 8), draw(3, 2, 9, 8, seed=1), draw(3, 2, 9, 8, seed=2)
    mask = padding_mask(torch.tensor([9, 1, 4]), 9)
    fused, plain = (function(q, k, v, mask, is_causal=True, score=score) for function in (attend_fused, attend))
    assert torch.equal(fused, plain)
    assert not torch.allclose(fused, attend(q, k, v, mask, is_causal=True), atol=1e-2)


def test_fused_attention_has_the_formulas_gradients() -> None:
    gradients = []
    for function in (attend, attend_fused):
        inputs = [draw(2, heads, 7, 8, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]
        function(*inputs, is_causal=True).square().sum().backward()
        gradients.append([tensor.grad for tensor in inputs])
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_a_grouped_model_with_its_kv_heads_repeated_is_a_multi_head_model() -> None:
    grouped = make_model(make_config(num_kv_heads=2))
    full = make_model(make_config(num_kv_heads=4))
    state = grouped.state_dict()
    for name, tensor in state.items():
        if name.endswith("qkv.weight"):
            q, k, v = tensor.split((16, 8, 8))
            k, v = (part.view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16) for part in (k, v))
            state[name] = torch.cat((q, k, v))
    full.load_state_dict(state)
    ids = draw_ids(2, 9)
    torch.testing.assert_close(full(ids), grouped(ids), atol=1e-5, rtol=1e-5)


def test_masks_are_true_where_attention_may_go() -> None:
    assert causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    mask = padding_mask(torch.tensor([2, 3]), 3)
    assert mask.shape == (2, 1, 1, 3)
    assert mask[:, 0, 0].tolist() == [[True, True, False], [True, True, True]]
    window = window_mask(6, 3) & causal_mask(6)
    assert window.int().tolist() == [[int(i - 3 < j <= i) for j in range(6)] for i in range(6)]


# Positions


def test_linear_scaling_turns_as_far_at_a_multiple_of_the_position() -> None:
    plain, scaled = base_frequencies(16, 500.0), rotary_frequencies(rotary_config("linear", rope_factor=4.0))
    for one, other in zip(rotary_tables(8, plain), rotary_tables(32, scaled), strict=True):
        torch.testing.assert_close(one, other[::4])


def test_llama3_scaling_slows_long_waves_leaves_short_ones_and_blends_between() -> None:
    config = rotary_config("llama3", rope_factor=8.0, rope_original_context=64, head_dim=32)
    plain, scaled = base_frequencies(32, 500.0), rotary_frequencies(config)
    wavelengths, kept = 2 * np.pi / plain.numpy(), (scaled / plain).numpy()
    assert (kept[wavelengths < 64 / 4] == 1).all()
    np.testing.assert_allclose(kept[wavelengths > 64], 1 / 8)
    between = kept[(wavelengths > 64 / 4) & (wavelengths < 64)]
    assert len(between) >= 3
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (np.diff(between) < 0).all()


def test_yarn_scaling_goes_from_the_fast_pairs_to_the_slow_ones_and_lengthens() -> None:
    config = rotary_config("yarn", rope_factor=4.0, rope_original_context=64, head_dim=32, rope_attention_factor=1.2)
    kept = (rotary_frequencies(config) / base_frequencies(32, 500.0)).numpy()
    turns = 64 * base_frequencies(32, 500.0).numpy() / (2 * np.pi)
    np.testing.assert_allclose(kept[turns < 1][1:], 1 / 4)
    assert (np.diff(kept) <= 1e-12).all()
    assert kept[0] == 1
    cos, sin = rotary_tables(5, rotary_frequencies(config), config.rope_attention_factor)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 1.2**2))


def test_sinusoids_in_halves_are_the_alternating_ones_sorted() -> None:
    alternating, halves = sinusoidal_table(9, 12), sinusoidal_table(9, 12, interleaved=False)
    torch.testing.assert_close(halves[:, :6], alternating[:, 0::2])
    torch.testing.assert_close(halves[:, 6:], alternating[:, 1::2])


# Windows and norms of heads


@pytest.mark.parametrize("attend_with", [attend, attend_fused])
def test_a_token_is_forgotten_when_it_leaves_the_windows_of_all_layers(attend_with: Attend) -> None:
    model = make_model(make_config(context=24, sliding_window=4))
    ids = draw_ids(1, 24)
    changed = ids.clone()
    changed[0, 2] = 1
    with torch.no_grad():
        moved = (model(ids, attend_with) - model(changed, attend_with)).abs().amax(-1)[0]
    # Through two layers a token reaches 2 · (4 - 1) positions further.
    assert (moved[2:9] > 1e-5).all()
    assert (moved[9:] == 0).all()
    assert (moved[:2] == 0).all()


@pytest.mark.parametrize(
    "config",
    [
        make_config(rope_scaling="yarn", rope_factor=2.0, query_key_norm=True, tie_embeddings=False),
        make_config(positions=Positions.LEARNED, norm="layernorm", activation="gelu", attention_bias=True),
        make_config(
            Architecture.ENCODER_DECODER, positions=Positions.SINUSOIDAL, source_vocab_size=23, logits_bias=True
        ),
        make_config(
            Architecture.ENCODER_DECODER, attention_score=AttentionScore.ADDITIVE, positions=Positions.SINUSOIDAL
        ),
    ],
)
def test_model_that_is_built_empty_has_all_but_its_weights(config: ModelConfig) -> None:
    state = torch.random.get_rng_state()
    full, empty = build(config, seed=1), build_empty(config)
    assert torch.equal(torch.random.get_rng_state(), state), "nothing was drawn"
    assert empty.training
    shapes, expected = ({name: each.shape for name, each in model.named_parameters()} for model in (empty, full))
    assert shapes == expected
    assert {(each.device.type, each.dtype) for each in empty.parameters()} == {("cpu", torch.float32)}
    tables = dict(empty.named_buffers())
    assert tables.keys() == dict(full.named_buffers()).keys()
    assert all(torch.equal(table, tables[name]) for name, table in full.named_buffers())
    if config.is_encoder_decoder:
        shared = [model.embedding.tokens is model.encoder.embedding.tokens for model in (full, empty)]
        assert shared == [config.source_vocab_size == config.vocab_size] * 2
    empty.load_state_dict(full.state_dict())
    assert all(torch.equal(each, dict(empty.named_parameters())[name]) for name, each in full.named_parameters())


def test_layers_of_two_kinds_see_each_its_own() -> None:
    model = make_model(make_config(sliding_window=4, layer_types=("sliding", "full")))
    assert [layer.self_attention.window for layer in model.layers] == [4, 0]


def test_queries_and_keys_are_normed_head_by_head_and_values_are_not() -> None:
    config = make_config(query_key_norm=True)
    module = make_model(config).layers[0].self_attention
    with torch.no_grad():
        module.query_norm.weight.fill_(3.0)
        q, k, v = module.split(module.project(draw(2, 5, config.d_model)))
    torch.testing.assert_close(q.pow(2).mean(-1).sqrt(), torch.full(q.shape[:-1], 3.0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(k.pow(2).mean(-1).sqrt(), torch.ones(k.shape[:-1]), rtol=1e-3, atol=1e-3)
    assert v.pow(2).mean(-1).std() > 1e-3


def test_rotary_angles_are_exact_far_from_the_start() -> None:
    cos, sin = rotary_tables(100_000, base_frequencies(8, 500_000.0))
    angles = np.float64(99_999) / np.float64(500_000.0) ** (np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos[-1].numpy(), np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin[-1].numpy(), np.sin(angles), atol=1e-7)


@pytest.mark.parametrize("positions", Positions)
def test_order_matters_whatever_the_positions(positions: Positions) -> None:
    # One layer: the causal mask alone cannot tell the order of what comes before the last token.
    model = make_model(make_config(positions=positions, num_layers=1))
    ids = torch.tensor([[5, 7, 9, 11]])
    swapped = torch.tensor([[7, 5, 9, 11]])
    assert (model(ids)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("positions", [Positions.SINUSOIDAL, Positions.LEARNED])
def test_added_positions_can_be_given(positions: Positions) -> None:
    model = make_model(make_config(positions=positions))
    ids = draw_ids(2, 5)
    whole = model.embed(torch.cat((draw_ids(2, 3), ids), dim=1))[:, 3:]
    torch.testing.assert_close(model.embed(ids, torch.arange(3, 8).expand(2, 5)), whole, atol=0.0, rtol=0.0)


def test_learned_positions_start_as_loud_as_the_scaled_tokens_beside_them() -> None:
    model = build(
        make_config(
            architecture=Architecture.ENCODER_DECODER,
            num_encoder_layers=1,
            scale_embeddings=True,
            positions=Positions.LEARNED,
        ),
        seed=0,
    )
    assert isinstance(model, EncoderDecoder)
    for embedding in (model.embedding, model.encoder.embedding):
        ids = torch.arange(embedding.tokens.num_embeddings)
        tokens = embedding.tokens(ids) * embedding.scale
        assert embedding.positions is not None
        positions = embedding.positions(torch.arange(embedding.positions.num_embeddings))
        assert positions.std().item() == pytest.approx(tokens.std().item(), rel=0.1)


def test_scaled_embeddings_are_the_tokens_times_the_root_of_the_width() -> None:
    model = build(make_config(scale_embeddings=True, positions=Positions.ROTARY), seed=0)
    ids = draw_ids(1, 4)
    torch.testing.assert_close(model.embed(ids), 4.0 * model.embedding.tokens.weight[ids])


# Layers


def test_pre_norm_normalises_the_branch_and_post_norm_the_sum() -> None:
    x = draw(2, 3, 16)
    for placement in NormPlacement:
        residual = Residual(make_config(norm_placement=placement))
        with torch.no_grad():
            residual.norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
        expected = {
            NormPlacement.PRE: x + torch.sin(residual.norm(x)),
            NormPlacement.POST: residual.norm(x + torch.sin(x)),
        }
        torch.testing.assert_close(residual(x, torch.sin), expected[placement])


@pytest.mark.parametrize("architecture", Architecture)
def test_only_pre_norm_models_end_in_a_norm_of_their_own(architecture: Architecture) -> None:
    for placement in NormPlacement:
        model = build(make_config(architecture, norm_placement=placement))
        norms = [model.final_norm] + ([model.encoder.final_norm] if isinstance(model, EncoderDecoder) else [])
        assert {type(norm) for norm in norms} == {nn.RMSNorm if placement is NormPlacement.PRE else nn.Identity}


def test_feed_forward_networks_are_their_formulas() -> None:
    x = draw(3, 16)
    gelu = FeedForward(make_config(activation=Activation.GELU, mlp_bias=True))
    inner = gelu.up(x)
    tanh = torch.tanh(np.sqrt(2.0 / np.pi) * (inner + 0.044715 * inner**3))
    torch.testing.assert_close(gelu(x), gelu.down(0.5 * inner * (1.0 + tanh)), atol=1e-6, rtol=1e-5)
    gated = GatedFeedForward(make_config())
    gate, up = (x @ weight.T for weight in gated.gate_up.weight.split(24))
    torch.testing.assert_close(gated(x), gated.down(gate * torch.sigmoid(gate) * up), atol=1e-6, rtol=1e-5)


def test_dropout_acts_in_training_and_only_there() -> None:
    config = make_config(dropout=0.5)
    ids, x = draw_ids(1, 8), draw(1, 8, 16)
    model, residual = build(config, seed=0), Residual(config)
    torch.manual_seed(0)
    for module, compute in ((model, lambda: model.embed(ids)), (residual, lambda: residual(x, torch.sin) - x)):
        assert 0.3 < (compute() == 0.0).float().mean() < 0.7
        module.eval()
        assert torch.equal(compute(), compute())
        assert (compute() != 0.0).all()


def test_a_layer_refuses_a_cross_attention_it_has_no_place_for_or_lacks() -> None:
    def unchanged(_: nn.Module, x: Tensor) -> Tensor:
        return x

    for architecture, attend_cross in ((Architecture.DECODER_ONLY, unchanged), (Architecture.ENCODER_DECODER, None)):
        layer = DecoderLayer(make_config(architecture))
        with pytest.raises(ValueError, match="attend_cross"):
            layer(draw(1, 2, 16), unchanged, attend_cross)


# Whole models

ADDITIVE = {"attention_score": AttentionScore.ADDITIVE, "positions": Positions.SINUSOIDAL}
KINDS = [pytest.param({"positions": each}, id=each) for each in Positions] + [pytest.param(ADDITIVE, id="additive")]


@pytest.mark.parametrize("architecture", Architecture)
def test_an_additive_model_adds_one_vector_for_each_head_and_a_dot_model_has_no_trace_of_it(
    architecture: Architecture,
) -> None:
    dot = build(make_config(architecture, positions=Positions.SINUSOIDAL), seed=0).state_dict()
    model = build(make_config(architecture, **ADDITIVE), seed=0)
    assert not any("score" in name for name in dot)
    added = {name: tensor for name, tensor in model.state_dict().items() if name not in dot}
    attentions = 2 if architecture is Architecture.DECODER_ONLY else 6
    assert len(added) == len(model.state_dict()) - len(dot) == attentions
    assert all(name.endswith("_attention.score.vector") and tensor.shape == (4, 4) for name, tensor in added.items())
    # A start that gives scores a spread below one, and queries and keys a gradient.
    assert 0.7 < torch.stack(list(added.values())).std() / 4**-0.5 < 1.3


def test_the_vectors_of_additive_scores_are_not_matrices_between_hidden_states() -> None:
    model = build(make_config(**ADDITIVE), seed=0)
    muon, adamw = make_optimizers(model, TrainConfig(steps=1, batch_tokens=1, optimizer="muon"))
    vectors = {id(module.vector) for module in model.modules() if isinstance(module, AdditiveScore)}
    owned = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in (muon, adamw)]
    assert vectors <= owned[1]
    assert not vectors & owned[0]


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_runs_and_gives_every_parameter_a_gradient(
    architecture: Architecture, kind: dict[str, object]
) -> None:
    for norm, placement, activation, tied in itertools.product(Norm, NormPlacement, Activation, (True, False)):
        config = make_config(
            architecture,
            **kind,
            norm=norm,
            norm_placement=placement,
            activation=activation,
            tie_embeddings=tied,
            attention_bias=norm is Norm.LAYER,
            mlp_bias=norm is Norm.LAYER,
            num_layers=1,
        )
        model = build(config, seed=0)
        logits = run(model, draw_ids(2, 6))
        assert logits.shape == (2, 6, config.vocab_size)
        logits.logsumexp(-1).sub(logits[..., 5]).mean().backward()
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        without += [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
        assert not without, config


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes_a_logit_before_it(architecture: Architecture, kind: dict[str, object]) -> None:
    model = make_model(make_config(architecture, **kind))
    ids = draw_ids(1, 10)
    before = run(model, ids)
    for changed in (1, 5, 9):
        others = ids.clone()
        others[:, changed:] = draw_ids(1, 10 - changed, seed=1)
        after = run(model, others)
        torch.testing.assert_close(after[:, :changed], before[:, :changed], atol=1e-6, rtol=0.0)
        assert (after[:, changed] - before[:, changed]).abs().max() > 1e-3


@pytest.mark.parametrize("positions", Positions)
def test_every_source_token_changes_every_logit(positions: Positions) -> None:
    model = make_model(make_config(Architecture.ENCODER_DECODER, positions=positions))
    ids, source = draw_ids(1, 4), draw_ids(1, 5)
    before = run(model, ids, source)
    for changed in range(5):
        others = source.clone()
        others[0, changed] = 3 + (others[0, changed] - 2) % 16
        assert (run(model, ids, others) - before).abs().amax(dim=-1).min() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", [attend, attend_fused])
def test_a_padded_source_gives_what_it_gives_alone(kind: dict[str, object], attention: Attend) -> None:
    # In float64, where rounding is far below any effect of padding.
    model = make_model(make_config(Architecture.ENCODER_DECODER, **kind)).double()
    lengths = torch.tensor([12, 1, 7])
    sources, targets = draw_ids(3, 12), draw_ids(3, 6, seed=1)
    together = model(sources, lengths, targets, attention)
    for row, length in enumerate(lengths.tolist()):
        alone = model(sources[row : row + 1, :length], lengths[row : row + 1], targets[row : row + 1], attention)
        torch.testing.assert_close(together[row], alone[0], atol=1e-10, rtol=1e-10)


def test_tied_embeddings_are_one_table_and_shared_by_the_source_where_vocabularies_are_equal() -> None:
    def tables(**changes: object) -> int:
        model = build(make_config(Architecture.ENCODER_DECODER, num_heads=4, **changes))
        return sum(parameter.shape in ((23, 16), (19, 16)) for parameter in model.parameters())

    assert tables(source_vocab_size=23, tie_embeddings=True) == 1
    assert tables(source_vocab_size=19, tie_embeddings=True) == 2
    assert tables(source_vocab_size=23, tie_embeddings=False) == 3
    # Vocabularies of the same size by chance.
    assert tables(source_vocab_size=23, share_embeddings=False) == 2


def test_a_seed_decides_the_weights_and_leaves_the_generator_alone() -> None:
    config = make_config()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = (build(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.tokens.weight"], other["embedding.tokens.weight"])


@pytest.mark.parametrize("num_layers", [2, 16])
def test_a_fresh_model_guesses_about_evenly_at_any_depth(num_layers: int) -> None:
    model = build(make_config(d_model=64, num_layers=num_layers, tie_embeddings=False), seed=0).eval()
    loss = nn.functional.cross_entropy(model(draw_ids(8, 16)).flatten(0, 1), draw_ids(8, 16, seed=1).flatten())
    assert loss.item() == pytest.approx(np.log(23), abs=0.5)


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_stays_near_float32(architecture: Architecture, kind: dict[str, object]) -> None:
    model = build(make_config(architecture, **kind), seed=0)
    ids = draw_ids(2, 8)
    exact = run(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run(model, ids)
    assert (rounded.float() - exact).abs().max() < 0.03 * exact.abs().max()


# The reference decoder


@pytest.mark.parametrize("architecture", Architecture)
def test_the_reference_is_the_formula_and_agrees_with_training_code(architecture: Architecture) -> None:
    model = make_model(make_config(architecture)).train()
    ids, source = draw_ids(1, 9), draw_ids(1, 7)
    is_pair = architecture is Architecture.ENCODER_DECODER
    found = reference.logits(model, ids[0].tolist(), source[0].tolist() if is_pair else None)
    assert model.training
    assert found.dtype == torch.float32
    assert not found.requires_grad
    torch.testing.assert_close(found, run(model.eval(), ids, source)[0].detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", Architecture)
def test_greedy_output_is_the_argmax_at_every_step(architecture: Architecture) -> None:
    model = make_model(make_config(architecture))
    is_pair = architecture is Architecture.ENCODER_DECODER
    source, prompt, start_id = ([4, 5, 6], [], 1) if is_pair else (None, [3, 4], None)
    given = ([1] if is_pair else []) + prompt
    output = reference.greedy(model, prompt, source, max_tokens=8, start_id=start_id)
    assert len(output) == 8
    teacher_forced = reference.logits(model, given + output[:-1], source)
    assert teacher_forced[len(given) - 1 :].argmax(-1).tolist() == output
    assert reference.greedy(model, prompt, source, max_tokens=8, start_id=start_id) == output


def test_greedy_output_ends_with_an_end_token_or_the_context() -> None:
    model = make_model(make_config())
    free = reference.greedy(model, [3], max_tokens=100)
    assert len(free) == model.config.context - 1
    end = free[4]
    assert reference.greedy(model, [3], max_tokens=100, eos_ids={end}) == free[: free.index(end) + 1]
    assert reference.greedy(model, [3], max_tokens=0) == []


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    model = make_model(make_config(tie_embeddings=False))
    with torch.no_grad():
        model.head.weight.zero_()
    assert reference.greedy(model, [3], max_tokens=2) == [0, 0]


def test_the_reference_refuses_what_it_cannot_run() -> None:
    causal, pair = make_model(make_config()), make_model(make_config(Architecture.ENCODER_DECODER))
    for model, sequence, source, problem in (
        (causal, [], None, "sequence has 0 tokens, must have 1 to 16"),
        (causal, [3] * 17, None, "sequence has 17 tokens, must have 1 to 16"),
        (causal, [3], [3], "decoder-only model given a source"),
        (pair, [1], None, "encoder-decoder model with no source"),
        (pair, [1], [], "source has 0 tokens, must have 1 to 12"),
        (make_model(make_config()).bfloat16(), [3], None, "the reference is float32"),
    ):
        with pytest.raises(ValueError, match=problem):
            reference.logits(model, sequence, source)

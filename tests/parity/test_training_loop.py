"""The loop: it learns, its figures mean what they say, and an update does not care how its batches are split."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.data.batches import IGNORED, Batch
from model.nn.transformer import EncoderDecoder, build
from model.spec.config import Architecture
from model.training import precision
from model.training.config import OptimizerName, TrainConfig, TrainDevice
from model.training.loop import Loop, StopRequested, TrainingError, batch_loss
from model.training.optimizers import learning_rate_factor, make_optimizers
from model.training.parallel import Parallel, SetupError
from model.training.precision import resolve_precision
from tests.training_runs import FAMILIES, make_batches, make_model_config, make_recipe

CPU = torch.device("cpu")


def make_loop(architecture: Architecture, *, dropout: float = 0.0, **changes: object) -> Loop:
    recipe = make_recipe(architecture, dropout=dropout, **changes)
    assert recipe.train is not None
    return Loop(build(recipe.model, seed=0), make_batches(recipe.model, recipe.train), recipe.train)


def settings(**changes: object) -> TrainConfig:
    values = {"steps": 100, "batch_tokens": 64, "device": "cpu", **changes}
    return TrainConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", OptimizerName)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_one_batch_can_be_learned_by_heart(architecture: Architecture, optimizer: OptimizerName) -> None:
    config = make_model_config(architecture)
    train = settings(
        optimizer=optimizer, learning_rate=1e-2, schedule="constant", warmup_fraction=0.0, precision="fp32"
    )
    batch = make_batches(config, train)(0)
    loop = Loop(build(config, seed=0), lambda _: batch, train)
    losses = [loop.update().loss for _ in range(60)]
    assert losses[0] > 2.0
    assert losses[-1] < 0.1


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_update_reports_the_mean_over_all_labels_and_the_norm_before_clipping(architecture: Architecture) -> None:
    loop = make_loop(architecture, gradient_accumulation=3, gradient_clip=1e-3)
    model = build(make_model_config(architecture), seed=0)
    batches = [loop._batch(index) for index in range(3)]
    assert len({batch.num_targets for batch in batches}) > 1 or architecture is Architecture.DECODER_ONLY
    total = sum(batch_loss(model, batch, reduction="sum") for batch in batches)
    assert isinstance(total, torch.Tensor)
    num_targets = sum(batch.num_targets for batch in batches)
    (total / num_targets).backward()
    norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))
    update = loop.update()
    assert update.num_targets == num_targets
    assert update.loss == pytest.approx(total.item() / num_targets, rel=1e-6)
    assert update.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert loop.step == 1


@pytest.mark.parametrize("architecture", FAMILIES)
def test_two_half_batches_are_one_whole_batch(architecture: Architecture) -> None:
    def half(batch: Batch, part: int) -> Batch:
        rows = slice(part, None, 2)
        return Batch(*(None if ids is None else ids[rows] for ids in _arrays(batch)))

    whole = make_loop(architecture, optimizer="adamw")
    halves = Loop(
        build(make_model_config(architecture), seed=0),
        lambda index: half(whole._batch(index // 2), index % 2),
        replace(whole.config, gradient_accumulation=2),
    )
    for _ in range(5):
        assert halves.update().loss == pytest.approx(whole.update().loss, abs=1e-6)
    for mine, other in zip(halves.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.0, atol=1e-6)


def _arrays(batch: Batch) -> tuple[np.ndarray | None, ...]:
    return batch.input_ids, batch.labels, batch.source_ids, batch.source_lengths


def test_padding_has_no_part_in_the_loss() -> None:
    model = build(make_model_config(Architecture.ENCODER_DECODER), seed=0)
    row = Batch(np.array([[1, 5]]), np.array([[5, 2]]), np.array([[6, 7, 2]]), np.array([3]))
    padded = Batch(
        np.array([[1, 5, 0, 0]]), np.array([[5, 2, IGNORED, IGNORED]]), np.array([[6, 7, 2, 0]]), np.array([3])
    )
    for smoothing in (0.0, 0.1):
        torch.testing.assert_close(
            batch_loss(model, padded, label_smoothing=smoothing),
            batch_loss(model, row, label_smoothing=smoothing),
            rtol=1e-6,
            atol=1e-6,
        )


def test_label_smoothing_spreads_its_share_over_the_whole_vocabulary() -> None:
    model = build(make_model_config(Architecture.DECODER_ONLY), seed=0)
    batch = Batch(np.array([[1, 5, 6]]), np.array([[5, 6, 2]]))
    logs = F.log_softmax(model(torch.from_numpy(batch.input_ids)), dim=-1)[0]
    true = logs[torch.arange(3), torch.tensor([5, 6, 2])]
    expected = -(0.9 * true + 0.1 * logs.mean(dim=-1)).sum()
    torch.testing.assert_close(batch_loss(model, batch, label_smoothing=0.1, reduction="sum"), expected)


def test_dropout_is_a_function_of_the_micro_batch_and_leaves_the_callers_generator_alone() -> None:
    before = torch.get_rng_state()
    loops = [make_loop(Architecture.DECODER_ONLY, dropout=0.3) for _ in range(2)]
    first = [loops[0].update().loss for _ in range(3)]
    torch.manual_seed(99)
    # Somebody else may draw as much as they like in between.
    second = [(torch.rand(5), loops[1].update().loss)[1] for _ in range(3)]
    assert first == second
    without = make_loop(Architecture.DECODER_ONLY).update().loss
    assert first[0] != without
    torch.set_rng_state(before)
    loops[0].update()
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_differ_between_micro_batches_and_seeds() -> None:
    def losses(seed: int) -> list[float]:
        loop = make_loop(Architecture.DECODER_ONLY, dropout=0.5, learning_rate=1e-30, matrix_learning_rate=1e-30)
        loop.config = replace(loop.config, seed=seed)
        batch = loop._batch(0)
        loop._batch = lambda _: batch
        return [loop.update().loss for _ in range(3)]

    assert len({*losses(0), *losses(1)}) == 6


def test_a_stop_comes_before_anything_is_computed() -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY)
    assert recipe.train is not None
    model = build(recipe.model, seed=0)
    loop = Loop(model, make_batches(recipe.model, recipe.train), recipe.train, stop=lambda: loop.step == 1)
    loop.update()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(StopRequested):
        loop.update()
    assert loop.step == 1
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), before, strict=True))


def test_a_loss_that_is_no_number_leaves_the_weights_alone() -> None:
    loop = make_loop(Architecture.DECODER_ONLY)
    with torch.no_grad():
        loop.model.final_norm.weight[0] = math.nan
    before = [parameter.clone() for parameter in loop.model.parameters()]
    with pytest.raises(TrainingError, match=r"^loss nan and gradient norm nan at step 1: .*$"):
        loop.update()
    assert all(torch.equal(p, q) or p.isnan().any() for p, q in zip(loop.model.parameters(), before, strict=True))
    assert loop.step == 0


def test_float16_leaves_out_updates_that_overflow_and_lowers_its_scale() -> None:
    loop = make_loop(Architecture.DECODER_ONLY, precision="fp16", steps=40)
    assert loop.scaler is not None
    loop.scaler._init_scale = 2.0**40
    before = [parameter.clone() for parameter in loop.model.parameters()]
    update = loop.update()
    assert update.skipped
    assert all(torch.equal(mine, other) for mine, other in zip(loop.model.parameters(), before, strict=True))
    updates = [loop.update() for _ in range(30)]
    assert not updates[-1].skipped
    assert updates[-1].loss < 0.9 * update.loss
    assert loop.num_skipped_in_row == 0
    assert loop.scaler.get_scale() < 2.0**40


def test_float16_gives_up_where_no_scale_helps() -> None:
    loop = make_loop(Architecture.DECODER_ONLY, precision="fp16", steps=100)
    with torch.no_grad():
        loop.model.final_norm.weight[0] = math.inf
    assert all(loop.update().skipped for _ in range(24))
    with pytest.raises(TrainingError, match="a lower learning rate"):
        loop.update()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_keeps_weights_in_float32(precision: str) -> None:
    loop = make_loop(Architecture.ENCODER_DECODER, precision=precision)
    first = loop.update()
    assert math.isfinite(first.loss)
    assert {parameter.dtype for parameter in loop.model.parameters()} == {torch.float32}


def test_auto_precision_asks_the_cpu() -> None:
    native = any(torch.cpu.get_capabilities().get(name) for name in ("amx_bf16", "avx512_bf16", "sve_bf16"))
    assert resolve_precision(settings().precision, CPU) == ("bf16" if native else "fp32")


@pytest.mark.parametrize(("trial", "isa"), [("os.kill(os.getpid(), 4)", "AVX512_CORE_BF16"), ("", "unset")])
def test_amx_whose_first_instruction_ends_a_process_is_not_used(
    monkeypatch: pytest.MonkeyPatch, trial: str, isa: str
) -> None:
    # Set before it is deleted: what the product sets by `putenv` is not in `os.environ`. Deleted alone, it would stay,
    # now for this test and at its end for the next.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    monkeypatch.setattr(precision, "_PROBE", f"import os\n{trial}")
    precision.avoid_broken_amx.__wrapped__()
    seen = 'import os; print(os.environ.get("ONEDNN_MAX_CPU_ISA", "unset"))'
    assert subprocess.check_output([sys.executable, "-c", seen], text=True).strip() == isa


def test_accumulation_must_be_shared_out_evenly() -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, gradient_accumulation=3)
    assert recipe.train is not None
    model = build(recipe.model, seed=0)
    with pytest.raises(SetupError, match="gradient_accumulation is 3, must be a multiple of the 2 processes"):
        Loop(model, make_batches(recipe.model, recipe.train), recipe.train, Parallel(world_size=2))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"optimizer": "muon"}, "parallelism fsdp needs optimizer adamw, not muon"),
        ({"optimizer": "adamw", "precision": "fp16"}, "parallelism fsdp needs precision bf16 or fp32, not fp16"),
    ],
)
def test_what_sharding_cannot_do_is_refused_by_name(changes: dict[str, object], problem: str) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, **{"parallelism": "fsdp", **changes})
    assert recipe.train is not None
    with pytest.raises(SetupError, match=problem):
        Loop(build(recipe.model, seed=0), make_batches(recipe.model, recipe.train), recipe.train)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_refused_by_name() -> None:
    config = settings(device=TrainDevice.CUDA)
    model = make_model_config(Architecture.DECODER_ONLY)
    with pytest.raises(SetupError, match=r"^device is cuda, torch .* sees no CUDA device here$"):
        Loop(build(model, seed=0), make_batches(model, config), config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_muon_moves_the_layers_matrices_and_adamw_all_else(architecture: Architecture, *, tied: bool) -> None:
    model = build(make_model_config(architecture, tie_embeddings=tied, mlp_bias=True), seed=0)
    muon, adamw = make_optimizers(model, settings())
    moved = [{id(p) for group in each.param_groups for p in group["params"]} for each in (muon, adamw)]
    layers = [*model.layers, *(model.encoder.layers if isinstance(model, EncoderDecoder) else ())]
    matrices = {id(p) for layer in layers for p in layer.parameters() if p.ndim == 2}
    assert moved[0] == matrices
    assert moved[1] == {id(p) for p in model.parameters()} - matrices


@pytest.mark.parametrize("optimizer", OptimizerName)
def test_norms_and_biases_do_not_decay(optimizer: OptimizerName) -> None:
    model = build(make_model_config(Architecture.DECODER_ONLY, mlp_bias=True), seed=0)
    config = settings(optimizer=optimizer, weight_decay=0.1)
    groups = [group for each in make_optimizers(model, config) for group in each.param_groups]
    for parameter in model.parameters():
        (group,) = (group for group in groups if any(parameter is p for p in group["params"]))
        assert group["weight_decay"] == (0.1 if parameter.ndim == 2 else 0.0)


def test_adamw_is_as_configured() -> None:
    model = nn.Linear(3, 2)
    (adamw,) = make_optimizers(model, settings(optimizer="adamw", beta2=0.98, epsilon=1e-9, learning_rate=0.5))
    assert all(group["betas"] == (0.9, 0.98) for group in adamw.param_groups)
    assert all(group["eps"] == 1e-9 for group in adamw.param_groups)
    assert all(group["lr"] == 0.5 for group in adamw.param_groups)


def factors(**changes: object) -> list[float]:
    config = settings(**changes)
    return [learning_rate_factor(config, step) for step in range(config.steps)]


def test_a_cosine_rises_to_its_peak_and_falls_towards_zero() -> None:
    shares = factors(warmup_fraction=0.1)
    assert shares[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(shares) == shares[9] == 1.0
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert 0.0 < shares[-1] < 1e-3


def test_noam_is_the_papers_formula_scaled_to_a_peak_of_one() -> None:
    warmup = 8
    paper = [512**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in range(1, 101)]
    shares = factors(schedule="noam", warmup_fraction=0.08)
    assert shares == pytest.approx([rate / max(paper) for rate in paper])
    assert shares[warmup - 1] == max(shares) == 1.0


def test_a_constant_rate_stays_where_the_warm_up_ended() -> None:
    assert factors(schedule="constant", warmup_fraction=0.02) == [0.5, *[1.0] * 99]


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_warm_up_may_take_none_of_the_run_or_all_of_it(schedule: str) -> None:
    for fraction in (0.0, 1.0):
        assert all(0.0 < share <= 1.0 for share in factors(schedule=schedule, warmup_fraction=fraction))

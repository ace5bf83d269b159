"""Recurrent encoder-decoders: their equations with torch's cells, their masks, their sizes, the trainer's commands."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from export.__main__ import main as export_main
from model import checkpoint, evaluate
from model.__main__ import main
from model.checkpoint import CheckpointError
from model.data.batches import Pair, pad
from model.hf.folder import ImportRefused
from model.hf.importer import plan
from model.nn.recurrent import RecurrentEncoderDecoder, build_recurrent
from model.nn.transformer import num_parameters
from model.spec import recurrent
from model.spec.config import Architecture, ConfigError
from model.spec.recurrent import NOT_EXPORTED, Cell, Context, RecurrentConfig
from model.spec.tokenizer import BOS_ID, EOS_ID
from model.training.config import OptimizerName, Schedule, TrainConfig, TrainPrecision
from model.training.loop import Loop
from model.training.presets import RecipeError, resolve
from tests.training_runs import PowerCut, assert_same_bits, cut_power, make_recipe, run

CONFIG = RecurrentConfig(vocab_size=16, context=32, d_model=12, hidden=10)
KINDS = tuple(product(Cell, Context))
CELLS = {Cell.RNN: nn.RNNCell, Cell.LSTM: nn.LSTMCell, Cell.GRU: nn.GRUCell}


@pytest.fixture(params=KINDS, ids="-".join)
def model(request: pytest.FixtureRequest) -> RecurrentEncoderDecoder:
    cell, attention = request.param
    config = replace(CONFIG, cell=cell, attention=attention, num_layers=2, num_encoder_layers=2)
    return build_recurrent(config, seed=0).eval()


def random_ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(3, CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def changed_at(ids: Tensor, position: int) -> Tensor:
    changed = ids.clone()
    changed[:, position] = 3 + (changed[:, position] - 2) % (CONFIG.vocab_size - 3)
    return changed


def test_padding_is_not_seen(model: RecurrentEncoderDecoder) -> None:
    sources, targets, lengths = random_ids(0, 3, 7), random_ids(1, 3, 5), torch.tensor([7, 4, 1])
    logits = model(sources, lengths, targets)
    other = torch.where(torch.arange(7) < lengths[:, None], sources, random_ids(2, 3, 7))
    wider = torch.cat((other, random_ids(3, 3, 4)), dim=1)
    torch.testing.assert_close(model(wider, lengths, targets), logits)
    for row, length in enumerate(lengths.tolist()):
        alone = model(sources[row : row + 1, :length], lengths[row : row + 1], targets[row : row + 1])
        torch.testing.assert_close(alone[0], logits[row])


def test_the_whole_source_is_read_and_targets_from_left_to_right(model: RecurrentEncoderDecoder) -> None:
    sources, targets, lengths = random_ids(0, 2, 6), random_ids(1, 2, 5), torch.tensor([6, 6])
    logits = model(sources, lengths, targets)
    for position in range(6):
        found = model(changed_at(sources, position), lengths, targets)
        assert not torch.allclose(found[:, 0], logits[:, 0], rtol=1e-5, atol=1e-7)
    for position in range(5):
        found = model(sources, lengths, changed_at(targets, position))
        torch.testing.assert_close(found[:, :position], logits[:, :position], rtol=0, atol=1e-6)
        assert not torch.allclose(found[:, position], logits[:, position], rtol=1e-4)


@pytest.mark.parametrize(("cell", "attention"), KINDS)
def test_a_target_is_decoded_as_the_equations_say(cell: Cell, attention: Context) -> None:
    """One layer that reads and two that write, by torch's cells of one step and the papers' sums."""
    model = build_recurrent(replace(CONFIG, cell=cell, attention=attention, num_layers=2, num_encoder_layers=1), seed=0)
    model.eval()
    sources, lengths, target = random_ids(0, 1, 5), torch.tensor([5]), random_ids(1, 1, 3)

    def one_step(stack: nn.Module, suffix: str, inputs: int) -> nn.Module:
        step, end = CELLS[cell](inputs, CONFIG.hidden), f"_{suffix}"
        weights = {name: value for name, value in stack.state_dict().items() if name.endswith(end)}
        step.load_state_dict({name.removesuffix(end): value for name, value in weights.items()})
        return step

    def output(state: Any) -> Tensor:
        return state[0][0] if cell is Cell.LSTM else state[0]

    def outputs(step: nn.Module, tokens: Tensor) -> list[Tensor]:
        state, found = None, []
        for token in tokens:
            state = step(token[None], state)
            found.append(output(state))
        return found

    def embed(ids: Tensor) -> Tensor:
        return model.tokens.weight[ids] * math.sqrt(CONFIG.d_model)

    tokens = embed(sources[0])
    forward = outputs(one_step(model.encoder, "l0", 12), tokens)
    backward = outputs(one_step(model.encoder, "l0_reverse", 12), tokens.flip(0))[::-1]
    annotations = [torch.cat(pair) for pair in zip(forward, backward, strict=True)]
    lower = one_step(model.decoder, "l0", 12 + 2 * CONFIG.hidden)
    upper = one_step(model.decoder, "l1", CONFIG.hidden)
    parts = torch.tanh(model.first_state(backward[0]))[None].split(CONFIG.hidden, dim=-1)
    states: list[Any] = [(parts[0], parts[2]), (parts[1], parts[3])] if cell is Cell.LSTM else list(parts)
    for token in target[0]:
        s = output(states[1])
        context = torch.cat((forward[-1], backward[0]))
        if attention is Context.ADDITIVE:
            energies = [
                (model.vector.weight[0] * torch.tanh(model.query.weight @ s + model.key.weight @ h)).sum()
                for h in annotations
            ]
            weights = torch.stack(energies).softmax(dim=0)
            context = sum(weight * h for weight, h in zip(weights, annotations, strict=True))
        embedded = embed(token)
        states[0] = lower(torch.cat((embedded, context))[None], states[0])
        states[1] = upper(output(states[0])[None], states[1])
        read = torch.tanh(model.readout(torch.cat((embedded, context, output(states[1])))))
        expected = model.tokens.weight @ read
    torch.testing.assert_close(model(sources, lengths, target)[0, -1], expected)


def test_sizes_are_counted_as_they_are() -> None:
    for cell, attention in KINDS:
        for changes in ({}, {"num_layers": 3, "num_encoder_layers": 2, "source_vocab_size": 9}):
            config = replace(CONFIG, cell=cell, attention=attention, **changes)
            assert recurrent.num_parameters(config) == num_parameters(build_recurrent(config, seed=0))
            assert f"{recurrent.num_parameters(config):,}" in recurrent.summary(config)


def test_weights_depend_on_the_seed_alone_and_an_lstm_begins_by_remembering() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (build_recurrent(CONFIG, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["query.weight"], other["query.weight"])
    lstm = build_recurrent(replace(CONFIG, cell=Cell.LSTM), seed=0)
    gates = (lstm.decoder.bias_ih_l0 + lstm.decoder.bias_hh_l0).chunk(4)
    assert [gate.unique().tolist() for gate in gates] == [[0.0], [1.0], [0.0], [0.0]]


def test_greedy_output_is_that_of_one_step_after_another(model: RecurrentEncoderDecoder) -> None:
    sources = [random_ids(seed, 2 + seed).tolist() for seed in range(5)]
    found = evaluate.greedy(model, sources, 6)
    for source, answer in zip(sources, found, strict=True):
        lengths = torch.tensor([len(source)])
        memory = model.encode(torch.tensor([source]), lengths)
        state, token, written = model.begin(memory), BOS_ID, []
        while len(written) < 6:
            hidden, state = model.advance(memory, lengths, torch.tensor([[token]]), state)
            if (token := int(model.unembed(hidden)[0, -1].argmax())) == EOS_ID:
                break
            written.append(token)
        assert written == answer


@pytest.mark.parametrize(
    ("cell", "attention", "precision"),
    [
        (Cell.RNN, Context.NONE, TrainPrecision.FP32),
        (Cell.LSTM, Context.ADDITIVE, TrainPrecision.FP32),
        (Cell.GRU, Context.ADDITIVE, TrainPrecision.BF16),
    ],
)
def test_a_batch_is_learned_by_heart_in_the_trainers_loop(
    cell: Cell, attention: Context, precision: TrainPrecision
) -> None:
    pairs = [
        Pair(random_ids(seed, 4 + seed % 5).tolist(), random_ids(100 + seed, 2 + seed % 4).tolist())
        for seed in range(6)
    ]
    model = build_recurrent(replace(CONFIG, d_model=16, hidden=24, cell=cell, attention=attention), seed=0)
    assert evaluate.exact_match(model, pairs) == 0.0
    train = TrainConfig(
        steps=120,
        batch_tokens=1,
        optimizer=OptimizerName.ADAMW,
        learning_rate=1e-2,
        schedule=Schedule.CONSTANT,
        precision=precision,
    )
    loop = Loop(model, lambda _: pad(pairs), train)
    losses = [loop.update().loss for _ in range(train.steps)]
    assert losses[0] > 2.0
    assert losses[-1] < 0.1
    assert evaluate.exact_match(model.eval(), pairs) == 1.0


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = replace(CONFIG, vocab_size=24, source_vocab_size=24, num_layers=2, num_encoder_layers=2, dropout=0.1)
    recipe = replace(make_recipe(Architecture.DECODER_ONLY, checkpoint_every=5, evaluate_every=4), model=config)
    run(recipe, tmp_path / "whole")
    with pytest.raises(PowerCut):
        run(recipe, tmp_path / "resumed", at={9: cut_power})
    run(recipe, tmp_path / "resumed", resume_run=True)
    assert_same_bits(tmp_path / "whole", tmp_path / "resumed")


def test_it_is_trained_evaluated_and_refused_by_the_same_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = [f"--set={each}" for each in ("d_model=16", "hidden=12", "cell=lstm", "max_examples=40", "batch_tokens=200")]
    folder = tmp_path / "checkpoint"
    assert main(["train", "dates-recurrent", *tiny, "--set=steps=3", "--set=attention=none", f"--out={folder}"]) == 0
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["evaluate", str(folder), "dates-recurrent", *tiny]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["exact_match"] == trained["exact_match"]
    loaded = checkpoint.load_any(folder)
    assert isinstance(loaded.config, RecurrentConfig)
    assert (loaded.config.cell, loaded.config.attention) == (Cell.LSTM, Context.NONE)
    with pytest.raises(CheckpointError, match="architecture is recurrent: it cannot be exported"):
        checkpoint.load(folder)
    assert export_main([str(folder), "--out", str(tmp_path / "artifact")]) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["problems"] == [NOT_EXPORTED]
    assert not (tmp_path / "artifact").exists()
    with pytest.raises(ImportRefused) as caught:
        plan(folder)
    assert any(problem.endswith(NOT_EXPORTED) for problem in caught.value.problems)
    assert main(["evaluate", str(folder), "dates"]) == 2
    assert "is recurrent, dates is for encoder-decoder" in capsys.readouterr().err


def test_what_is_wrong_with_a_recurrent_recipe_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as wrong:
        RecurrentConfig(vocab_size=2, context=0, d_model=4, hidden=4, cell="elman", dropout=1.0)  # type: ignore[arg-type]
    assert wrong.value.problems == (
        "cell is 'elman', must be one of rnn, lstm, gru",
        "context is 0, must be at least 1",
        "dropout is 1.0, must be in [0, 1)",
        "eos_id is 2, must be in [0, 2)",
    )
    for overrides, problem in (
        (["num_heads=2"], "override 'num_heads' is a field of neither"),
        (["parallelism=fsdp"], "recurrent networks train with ddp"),
        (["source=stdlib", "max_examples=0"], "stdlib needs decoder-only"),
    ):
        with pytest.raises(RecipeError, match=problem):
            resolve("dates-recurrent", overrides)
    with pytest.raises(RecipeError, match="cannot be exported or served"):
        _ = resolve("dates-recurrent").transformer

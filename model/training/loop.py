"""One update of the weights: forward, backward, clip, step.

Teacher forcing: the model reads every true token and predicts the next, all positions at once, under cross-entropy. An
update's loss is the sum over all labels of its micro-batches divided by their number. It does not depend on how many
micro-batches or processes share the labels.

Dropout's generator is seeded for every micro-batch by its index. Masks are thus a function of the micro-batch: there is
no generator state to save, and any number of processes draws the same masks.

Trains any module that is called like a `Transformer`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.data.batches import Batch
from model.nn.attention import Attend, attend, attend_fused
from model.training.config import TrainConfig, TrainPrecision
from model.training.optimizers import learning_rate_factor, make_optimizers, set_learning_rates
from model.training.parallel import Parallel, SetupError, alone
from model.training.precision import autocast, avoid_broken_amx, make_scaler, resolve_precision

# On CPUs the plain formula trains faster than the fused kernel's backward pass until the S×T matrix gets large.
_MAX_PLAIN_ATTENTION = 512
# By then a scale of 2^16 is down to 2^-8: the gradients themselves are not finite.
_MAX_SKIPPED_IN_ROW = 24


class TrainingError(Exception):
    """A run cannot continue."""


class StopRequested(Exception):
    """A process was asked to stop; no process has begun the next update."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update's figures, over all processes.

    `loss` is the minimized loss in nats per label; it includes label smoothing. `gradient_norm` is before clipping.
    `num_targets` labels were predicted in `seconds`. `skipped`: a gradient overflowed float16 and the weights were not
    changed; the figures are then not finite.
    """

    loss: float
    gradient_norm: float
    learning_rate_factor: float
    num_targets: int
    seconds: float
    skipped: bool = False


class Loop:
    """A model, its optimizers and its position in the data, `step` updates on.

    Args:
        model: float32; it is moved to the device and put in training mode.
        batch: micro-batch by its global index; update u takes indices u·G … u·G + G - 1, G = gradient_accumulation.
        config: everything else.
        parallel: of R processes, process r takes every R-th micro-batch of an update from its r-th on; None is a single
            process on the configuration's device.
        stop: called before every update, in every process.

    Raises:
        SetupError: when R does not divide G, or the configuration's device is missing.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[[int], Batch],
        config: TrainConfig,
        parallel: Parallel | None = None,
        *,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.parallel = alone(config) if parallel is None else parallel
        if config.gradient_accumulation % self.parallel.world_size:
            raise SetupError(
                f"gradient_accumulation is {config.gradient_accumulation}, must be a multiple of the "
                f"{self.parallel.world_size} processes that share it"
            )
        self.model = model.train()
        self.config = config
        self.step = 0
        self.num_skipped_in_row = 0
        self.precision = resolve_precision(config.precision, self.parallel.device)
        if self.precision is TrainPrecision.BF16 and self.parallel.device.type == "cpu":
            avoid_broken_amx()
        self.scaler = make_scaler(self.precision, self.parallel.device)
        self._wrapped = self.parallel.wrap(model)
        self.optimizers = make_optimizers(model, config)
        self._peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in self.optimizers]
        self._batch = batch
        self._stop = stop

    def update(self) -> Update:
        """Runs the next update.

        Raises:
            StopRequested: before anything is computed, when any process was asked to stop.
            TrainingError: when the loss or a gradient is not finite; the weights are unchanged.
        """
        started = time.perf_counter()
        config, parallel = self.config, self.parallel
        first = self.step * config.gradient_accumulation
        indices = range(first + parallel.rank, first + config.gradient_accumulation, parallel.world_size)
        batches = {index: self._batch(index) for index in indices}
        # One exchange for the number of labels and the stop request.
        labels, stops = parallel.sum(sum(batch.num_targets for batch in batches.values()), self._stop())
        if stops:
            raise StopRequested
        factor = learning_rate_factor(config, self.step)
        set_learning_rates(self.optimizers, self._peaks, factor)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        # Processes average their gradients; the loss is a mean over labels.
        loss = self._accumulate(batches, scale=parallel.world_size / labels)
        norm = self._clip()
        (loss,) = parallel.sum(loss / parallel.world_size)
        skipped = self._apply(loss, norm)
        self.step += 1
        return Update(loss, norm, factor, int(labels), time.perf_counter() - started, skipped)

    def _accumulate(self, batches: dict[int, Batch], scale: float) -> float:
        """Accumulates the gradients of this process's micro-batches; returns the sum of their scaled losses."""
        device = self.parallel.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        last = next(reversed(batches))
        with _own_generator(device):
            for index, batch in batches.items():
                _seed_dropout(self.config.seed, index, device)
                with self.parallel.accumulating(self._wrapped, is_last=index == last):
                    with autocast(self.precision, device):
                        loss = scale * batch_loss(
                            self._wrapped, batch, label_smoothing=self.config.label_smoothing, reduction="sum"
                        )
                    scaled = loss if self.scaler is None else self.scaler.scale(loss)
                    scaled.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total.item()

    def _clip(self) -> float:
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip)
        return self.parallel.number(norm)

    def _apply(self, loss: float, norm: float) -> bool:
        """Steps the optimizers, or skips the step if a gradient overflowed float16; returns whether it was skipped."""
        overflowed = not (math.isfinite(loss) and math.isfinite(norm))
        self.num_skipped_in_row = self.num_skipped_in_row + 1 if overflowed else 0
        if overflowed and (self.scaler is None or self.num_skipped_in_row > _MAX_SKIPPED_IN_ROW):
            raise TrainingError(
                f"loss {loss} and gradient norm {norm} at step {self.step + 1}: "
                "a lower learning rate or a longer warm-up may help"
            )
        if not overflowed:
            for optimizer in self.optimizers:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        return overflowed


def batch_loss(
    model: nn.Module,
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Cross-entropy in nats over the batch's labels, their mean or their sum, without padding.

    A batch with sources is for an encoder-decoder, one without for a decoder-only model. With label smoothing ε each
    label keeps 1 - ε of its probability, and the rest is spread over the whole vocabulary (Szegedy et al., 2016).
    """
    device = next(model.parameters()).device
    input_ids, labels = (torch.from_numpy(ids).to(device) for ids in (batch.input_ids, batch.labels))
    formula = _attend_for(batch, device)
    if batch.source_ids is None or batch.source_lengths is None:
        logits = model(input_ids, formula)
    else:
        sources, lengths = (torch.from_numpy(ids).to(device) for ids in (batch.source_ids, batch.source_lengths))
        logits = model(sources, lengths, input_ids, formula)
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=label_smoothing, reduction=reduction
    )


def _attend_for(batch: Batch, device: torch.device) -> Attend:
    longest = max(ids.shape[1] for ids in (batch.input_ids, batch.source_ids) if ids is not None)
    return attend if device.type == "cpu" and longest <= _MAX_PLAIN_ATTENTION else attend_fused


@contextlib.contextmanager
def _own_generator(device: torch.device) -> Iterator[None]:
    """Restores the process's random generators afterwards."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type="cuda"):
        yield


def _seed_dropout(seed: int, index: int, device: torch.device) -> None:
    """Hashes both numbers, so that seeds of neighboring indices are independent."""
    mixed = int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
    else:
        torch.default_generator.manual_seed(mixed)

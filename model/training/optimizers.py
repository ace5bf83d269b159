"""Optimizers: AdamW, or Muon on the layers' matrices with AdamW on the rest; warm-up, then a schedule.

Muon orthogonalizes each matrix's momentum. It is meant for matrices between hidden states: embeddings, heads, norms and
biases stay with AdamW.

Sources: AdamW, Loshchilov and Hutter (2019); Muon, Jordan et al. (2024), as in `torch.optim.Muon`; warm-up and inverse
square root, Vaswani et al. (2017), section 5.3; cosine, Loshchilov and Hutter, "SGDR" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from model.nn.transformer import Decoder
from model.training.config import OptimizerName, Schedule, TrainConfig


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Optimizers that own every parameter once; each group's `lr` is its peak rate.

    Muon takes the weights of all `nn.Linear` but a transformer's head.
    """
    matrices, others = _split_parameters(model)
    if config.optimizer is OptimizerName.ADAMW:
        return [_make_adamw(matrices, others, config)]
    muon = torch.optim.Muon(
        matrices, lr=config.matrix_learning_rate, weight_decay=config.weight_decay, momentum=config.momentum
    )
    return [muon, _make_adamw([], others, config)]


def set_learning_rates(
    optimizers: Sequence[torch.optim.Optimizer], peaks: Sequence[Sequence[float]], factor: float
) -> None:
    """Sets each group's rate to its peak times `factor`."""
    for optimizer, rates in zip(optimizers, peaks, strict=True):
        for group, peak in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = peak * factor


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak rate at a step counted from 0: linear to 1 at the end of the warm-up, then the schedule.

    `cosine` ends at 0 with the last step; `noam` is √(warm-up / steps done).
    """
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule is Schedule.CONSTANT:
        return 1.0
    if config.schedule is Schedule.NOAM:
        return math.sqrt(warmup / (step + 1))
    progress = (step - warmup + 1) / (config.steps - warmup + 1)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _make_adamw(matrices: list[nn.Parameter], others: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    # Weight decay of norm scales and biases only costs accuracy.
    groups = [
        {"params": [*matrices, *(p for p in others if p.ndim > 1)], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(0.9, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def _split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of linear maps between hidden states, and all other parameters."""
    head = model.head if isinstance(model, Decoder) else None
    inner = {module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not head}
    parameters = list(model.parameters())
    return [p for p in parameters if p in inner], [p for p in parameters if p not in inner]

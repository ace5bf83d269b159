"""Several processes that train one model under `torchrun`; a single process exchanges nothing.

`ddp` gives every process a whole copy and averages gradients (Li et al., 2020). `fsdp` shards weights, gradients and
optimizer state over the processes and assembles a layer only while it computes (Zhao et al., 2023; torch's FSDP2), for
models larger than one card. Either way an update is the same as in one process.

Numbers that decide something (label counts, losses, scores) go over gloo, gradients and weights over NCCL on GPUs.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.training.config import OptimizerName, Parallelism, TrainConfig, TrainDevice, TrainPrecision

T = TypeVar("T")

_GLOO = "gloo"
_GLOO_AND_NCCL = "cpu:gloo,cuda:nccl"


class ParallelError(Exception):
    """The processes disagree, or another one failed."""


class SetupError(ValueError):
    """This machine, or this number of processes, cannot run the configuration."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """One process among `world_size`, by default a single one, with its device.

    The first process, rank 0, is the only one that writes files or prints.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kind: Parallelism = Parallelism.DDP

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Whether the model is sharded."""
        return self.kind is Parallelism.FSDP and self.world_size > 1

    def wrap(self, model: nn.Module) -> nn.Module:
        """Moves a model to the device; returns the module to call for a forward pass in training.

        Under `fsdp` the parameters of `model` are replaced by shards: make optimizers afterwards.
        """
        if self.shards:
            _sharding().shard(model, self.device.type, self.world_size)
            return model
        model.to(self.device)
        if self.world_size == 1:
            return model
        device_ids = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(model, device_ids=device_ids, forward_sync_buffers=False)

    @contextlib.contextmanager
    def accumulating(self, wrapped: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Around the forward and backward pass of one micro-batch: DDP exchanges gradients after the last one only.

        FSDP exchanges every time, since no process can hold the gradients of the whole model.
        """
        if isinstance(wrapped, DistributedDataParallel) and not is_last:
            with wrapped.no_sync():
                yield
        else:
            yield

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Around evaluation, a collective call: dropout off; reshards afterwards."""
        model.eval()
        try:
            yield
        finally:
            if self.shards:
                _sharding().reshard(model)
            model.train()

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all processes, in double precision."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def broadcast(self, value: T) -> T:
        """The first process's value, which must be picklable."""
        if self.world_size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        received: T = box[0]
        return received

    def together(self, action: Callable[[], T]) -> T:
        """Runs an action in every process; if it fails in one, it fails in all.

        Raises:
            Exception: the action's own.
            ParallelError: when it raised in another process alone.
        """
        if self.world_size == 1:
            return action()
        try:
            result = action()
        except Exception as error:
            self._gather(str(error))
            raise
        for rank, message in enumerate(self._gather(None)):
            if message is not None:
                raise ParallelError(f"process {rank}: {message}")
        return result

    def on_first(self, action: Callable[[], object]) -> None:
        """Runs an action in the first process while the others wait; if it fails, all fail."""
        self.together(action if self.is_first else lambda: None)

    def check_same(self, identity: Mapping[str, Any]) -> None:
        """Checks that all processes train the same model on the same data.

        Raises:
            ParallelError: naming what differs.
        """

        def compare() -> None:
            first = self.broadcast(dict(identity))
            differing = sorted(key for key in first.keys() | identity.keys() if first.get(key) != identity.get(key))
            if differing:
                raise ParallelError(f"{', '.join(differing)} differ from process 0's")

        self.together(compare)

    def full_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Unsharded tensors in the first process, none in the others; assembled one by one on the CPU."""
        full = {}
        for name, tensor in tensors.items():
            value = tensor.detach()
            if self.shards:
                value = _sharding().full_tensor(value).cpu()
            if self.is_first:
                full[name] = value
        return full

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """This process's shard of a tensor that every process has whole, sharded like `like`."""
        return _sharding().shard_like(full, like) if self.shards else full

    def number(self, scalar: Tensor) -> float:
        """The value of a scalar tensor, which may be sharded."""
        return float(_sharding().full_tensor(scalar) if self.shards else scalar)

    def _gather(self, message: str | None) -> list[str | None]:
        messages: list[str | None] = [None] * self.world_size
        dist.all_gather_object(messages, message)
        return messages


def _sharding() -> Any:
    """`model.training.sharding`, imported only under FSDP because it is slow to import."""
    from model.training import sharding

    return sharding


def alone(config: TrainConfig) -> Parallel:
    """A single process on the configuration's device.

    Raises:
        SetupError: when the device is missing, or settings exclude each other.
    """
    check_combination(config)
    return Parallel(device=resolve_device(config.device), kind=config.parallelism)


@contextlib.contextmanager
def start(config: TrainConfig) -> Iterator[Parallel]:
    """Joins the other processes if `torchrun` started this one; uses an existing process group.

    Raises:
        SetupError: when the device is missing, or settings exclude each other.
    """
    is_mine = dist.is_torchelastic_launched() and not dist.is_initialized()
    if not (is_mine or dist.is_initialized()):
        yield alone(config)
        return
    check_combination(config)
    device = resolve_device(config.device, dist.get_node_local_rank(fallback_rank=0))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if is_mine:
        _join(device)
    try:
        yield Parallel(dist.get_rank(), dist.get_world_size(), device, config.parallelism)
    finally:
        if is_mine:
            _leave()


def _join(device: torch.device) -> None:
    # Functions in this module bind the process group of their import as a default argument, and DDP imports it at first
    # use. A group bound that way would outlive `_leave` with gloo's threads, which can abort a process at exit.
    import torch.distributed.nn  # noqa: F401

    dist.init_process_group(_GLOO_AND_NCCL if device.type == "cuda" else _GLOO)


def _leave() -> None:
    # Wrapped models hold the group, some of them in reference cycles.
    gc.collect()
    dist.destroy_process_group()


def resolve_device(wanted: TrainDevice, local_rank: int = 0) -> torch.device:
    """Resolves `auto`, and assigns each process of a machine its own card.

    Raises:
        SetupError: when CUDA is chosen and there is no card for this process.
    """
    num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is TrainDevice.CPU or (wanted is TrainDevice.AUTO and not num_cards):
        return torch.device("cpu")
    if not num_cards:
        raise SetupError(f"device is {wanted}, torch {torch.__version__} sees no CUDA device here")
    if local_rank >= num_cards:
        raise SetupError(f"device is {wanted}, process {local_rank + 1} of this machine has none of its {num_cards}")
    return torch.device("cuda", local_rank)


def check_combination(config: TrainConfig) -> None:
    """Rejects settings that sharded training does not support.

    Raises:
        SetupError: listing every setting that does not go with `fsdp`.
    """
    if config.parallelism is not Parallelism.FSDP:
        return
    problems = []
    if config.optimizer is not OptimizerName.ADAMW:
        # Muon needs whole matrices; a process has only shards.
        problems.append(f"parallelism fsdp needs optimizer adamw, not {config.optimizer}")
    if config.precision is TrainPrecision.FP16:
        # The gradient scaler detects overflow in its own process alone.
        problems.append("parallelism fsdp needs precision bf16 or fp32, not fp16")
    if problems:
        raise SetupError("; ".join(problems))

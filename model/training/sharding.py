"""Sharded weights by torch's FSDP2. Imported only under FSDP: it takes more than a second to import."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from model.nn.layers import DecoderLayer, EncoderLayer
from model.nn.transformer import EncoderDecoder


def shard(model: nn.Module, device_type: str, num_shards: int) -> None:
    """Shards a model's parameters in place, per layer and the rest together, and moves them to the device."""
    mesh = init_device_mesh(device_type, (num_shards,))
    for layer in [module for module in model.modules() if isinstance(module, EncoderLayer | DecoderLayer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if isinstance(model, EncoderDecoder):
        # Token-by-token decoding calls these two methods instead of the model.
        register_fsdp_forward_method(model, "encode")
        register_fsdp_forward_method(model, "decode")


def reshard(model: nn.Module) -> None:
    """Reshards parameters after forward passes without a backward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor, a collective call; other tensors are returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a tensor that every process has whole, if `like` is a shard of that shape."""
    if isinstance(like, DTensor) and full.shape == like.shape:
        # Without a source rank nothing is sent.
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return full

"""Weights in pieces: torch's FSDP2, behind the few things that the rest needs of it.

Imported only by processes that share a model out: it brings a good second's worth of modules along. What it is for,
`model.training.parallel` says.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from model.nn.layers import DecoderLayer, EncoderLayer
from model.nn.transformer import EncoderDecoder


def shard(model: nn.Module, device_type: str, num_pieces: int) -> None:
    """Cuts a model's parameters in place, each layer by itself and the rest together, and moves them to the device."""
    mesh = init_device_mesh(device_type, (num_pieces,))
    for layer in [module for module in model.modules() if isinstance(module, EncoderLayer | DecoderLayer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if isinstance(model, EncoderDecoder):
        # Decoding token by token calls these two instead of the model.
        register_fsdp_forward_method(model, "encode")
        register_fsdp_forward_method(model, "decode")


def reshard(model: nn.Module) -> None:
    """Cuts again what was put together for forward passes that no backward pass followed."""
    if isinstance(model, FSDPModule):
        model.reshard()


def assemble(tensor: Tensor) -> Tensor:
    """The whole of a tensor in pieces, all processes taking part; any other is whole already."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """This process's piece of a whole tensor that every process has; one of another shape than `like` stays whole."""
    if isinstance(like, DTensor) and whole.shape == like.shape:
        # Without a source to send it, nothing is sent.
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return whole

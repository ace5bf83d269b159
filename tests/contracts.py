"""The methods of every protocol that the server speaks."""

from __future__ import annotations

from google.protobuf.descriptor import MethodDescriptor

from onward.inference import open_inference_pb2
from onward.v1 import generation_pb2, model_pb2
from service.access import Permission
from service.transport.permissions import PERMISSIONS

METHODS: dict[str, MethodDescriptor] = {
    f"{service.full_name}/{method.name}": method
    for module in (generation_pb2, model_pb2, open_inference_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""By path, without its leading slash."""
MANAGING = {path for path, method in METHODS.items() if PERMISSIONS[method.name] is Permission.MANAGE}
"""Paths of the methods that manage models."""

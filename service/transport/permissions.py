"""What an API key must be good for, method by method; a test proves the table total over our services."""

from __future__ import annotations

from collections.abc import Mapping

from service.access import Permission

PERMISSIONS: Mapping[str, Permission] = {
    "Generate": Permission.GENERATE,
    "GenerateStream": Permission.GENERATE,
    "Score": Permission.GENERATE,
    "Estimate": Permission.GENERATE,
    "Explain": Permission.GENERATE,
    "Tokenize": Permission.GENERATE,
    "Detokenize": Permission.GENERATE,
    "ListModels": Permission.GENERATE,
    "GetModel": Permission.GENERATE,
    "ServerLive": Permission.GENERATE,
    "ServerReady": Permission.GENERATE,
    "ModelReady": Permission.GENERATE,
    "ServerMetadata": Permission.GENERATE,
    "ModelMetadata": Permission.GENERATE,
    "ModelInfer": Permission.GENERATE,
    "ModelStreamInfer": Permission.GENERATE,
    "RepositoryIndex": Permission.GENERATE,
    # Of health: it names the models. `Check` and `Watch` need no key.
    "List": Permission.GENERATE,
    "RepositoryModelLoad": Permission.MANAGE,
    "RepositoryModelUnload": Permission.MANAGE,
    # Occupies a model until it is done.
    "VerifyParity": Permission.MANAGE,
    "LoadModel": Permission.MANAGE,
    "UnloadModel": Permission.MANAGE,
    "ReloadModel": Permission.MANAGE,
}
MANAGING = frozenset(name for name, permission in PERMISSIONS.items() if permission is Permission.MANAGE)
"""The methods that change or occupy a model."""

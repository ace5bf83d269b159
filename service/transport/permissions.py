"""The permission that each method needs of an API key; a test proves the table total over our services."""

from __future__ import annotations

from collections.abc import Mapping

from service.access import Permission

_GENERATING = (
    "Generate", "GenerateStream", "Score", "Estimate", "Explain", "Tokenize", "Detokenize", "ListModels", "GetModel",
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer",
    "RepositoryIndex",
    "List",  # of health: it names the models. `Check` and `Watch` need no key.
)  # fmt: skip
MANAGING = frozenset({
    "RepositoryModelLoad", "RepositoryModelUnload", "LoadModel", "UnloadModel", "ReloadModel",
    "VerifyParity",  # occupies a model until it is done
})  # fmt: skip
"""The methods that change or occupy a model."""
PERMISSIONS: Mapping[str, Permission] = {
    **dict.fromkeys(_GENERATING, Permission.GENERATE),
    **dict.fromkeys(MANAGING, Permission.MANAGE),
}

"""Imports every module of the installed server and fails if anything of the training side came along.

Run by `make serving-check` in an environment that holds the serving dependencies alone; not a pytest module, because
that environment holds no pytest either.
"""

import importlib
import importlib.util
import pkgutil
import sys

import service
from model import kernels

UNWANTED = ("torch", "onnx", "onnxscript", "babel", "matplotlib", "safetensors", "rich", "grpc_tools", "pytest")
UNWANTED += ("opentelemetry", "sentencepiece", "transformers", "uvicorn")
# Imported only where their extra is wanted.
OF_EXTRAS = ("service.telemetry.otel", "service.transport.http.connection", "service.transport.http.server")

assert not any(map(importlib.util.find_spec, ("proto", "client"))), "names that are others' in a user's environment"
present = [name for name in UNWANTED if importlib.util.find_spec(name)]
assert not present, f"the serving install brought {present}"
found = [module.name for module in pkgutil.walk_packages(service.__path__, "service.")]
names = [name for name in found if "__main__" not in name and name not in OF_EXTRAS]
for name in names:
    importlib.import_module(name)
assert len(names) > 10, f"only {names} were found: is the package whole?"
loaded = [name for name in UNWANTED if name in sys.modules]
assert not loaded, f"importing the server loaded {loaded}"
sources = kernels.sources(kernels.FOLDER)
assert sources, f"{kernels.FOLDER} has no sources of kernels to build"
# What was built of other sources stays where it was.
assert set(kernels.FOLDER.glob("libonward-*.so")) <= {kernels.library()}, "a library of other sources came along"
print(f"imported {len(names)} service modules from {service.__path__[0]}, without {', '.join(UNWANTED)}")

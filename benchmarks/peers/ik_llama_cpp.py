"""ik_llama.cpp through ik-llama-cpp-python's low-level functions, as `llama_cpp`, whose files it reads.

Its weights are interleaved at load for its own kernels. Four bits are q4_0, as its own quantizer makes it. All
sequences share one K/V buffer: it has no other kind.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.protocol import main


class IkLlamaCpp(LlamaCpp):
    """Precisions are GGUF's type names in lower case."""

    package: ClassVar[str] = "ik-llama-cpp-python"

    def _start(self) -> Any:
        """The initialized library."""
        if self._library is None:
            from ik_llama_cpp import _ctypes_api

            _ctypes_api.llama_backend_init()
            self._library = _ctypes_api
        return self._library

    def _quantize(self, whole: Path, staged: Path) -> None:
        """Runs the quantizer that the package brings."""
        import ik_llama_cpp

        program = Path(ik_llama_cpp.__file__).parent / "bin" / "llama-quantize"
        command = [str(program), str(whole), str(staged), self._weights, str(self._options.threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"llama-quantize exited with {done.returncode}: {done.stdout.strip()[-500:]}")

    def _set_model(self, settings: Any) -> None:
        settings.repack_tensors = True

    def _set_context(self, settings: Any) -> None:
        settings.flash_attn = settings.n_seq_max == 1

    def _clear(self) -> None:
        self._library.llama_kv_cache_clear(self._context)


if __name__ == "__main__":
    main(IkLlamaCpp)

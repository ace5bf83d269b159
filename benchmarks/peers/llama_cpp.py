"""llama.cpp through llama-cpp-python's low-level functions: one sequence for each prompt, greedy decoding.

Four bits are q4_0, as its own quantizer makes it: llama.cpp repacks this type at load for the processor's widest
instructions. Repacking is off for q8_0 and q4_0 on a processor with AMX, where it crashes llama-cpp-python 0.3.36.
K/V is float16, its default, or with `-kv8` behind a precision q8_0; flash attention is on. Weights are read, not
mapped, so that they lie in huge pages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.protocol import Options, System, Window, main, nats_of

_ERROR_LEVEL = 4
_QUANTIZED = {"q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}
"""Precisions that llama.cpp's own quantizer makes from a float32 file, with its names for them."""
_ROOM_MULTIPLE = 256
_MICRO_BATCH = 512
_Q8_0 = 8
"""GGML's number of the type."""
_Fed = tuple[int, int, int, bool]
"""A token, its position, its sequence, whether its logits are wanted."""


class LlamaCpp(System):
    """Precisions are GGUF's type names in lower case."""

    package: ClassVar[str] = "llama-cpp-python"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._weights, _, self._kv = options.precision.partition("-")
        self._file: Path = options.work / f"{self._weights}.gguf"
        self._library: Any = None
        self._model: Any = None
        self._context: Any = None
        self._context_key = (0, 0)
        self._num_logits = 0
        self._log: Any = None

    def prepare(self) -> None:
        """Writes the GGUF file; a quantized one is made from float32 by llama.cpp."""
        if self._file.exists():
            return
        if self._weights not in _QUANTIZED:
            write_gguf(self._options.folder, self._file, self._weights.upper())
            return
        whole = self._options.work / "f32.gguf"
        if not whole.exists():
            write_gguf(self._options.folder, whole, "F32")
        staged = self._file.with_suffix(".part")
        self._quantize(whole, staged)
        staged.rename(self._file)

    def _quantize(self, whole: Path, staged: Path) -> None:
        """Quantizes a float32 file."""
        library = self._start()
        settings = library.llama_model_quantize_default_params()
        settings.ftype = getattr(library, _QUANTIZED[self._weights])
        settings.nthread = self._options.threads
        if code := library.llama_model_quantize(str(whole).encode(), str(staged).encode(), ctypes.byref(settings)):
            raise RuntimeError(f"llama_model_quantize returned {code}")

    def load(self) -> str:
        """Loads the model; returns the package and its version."""
        library = self._start()
        settings = library.llama_model_default_params()
        settings.n_gpu_layers = 0
        settings.use_mmap = False
        self._set_model(settings)
        self._model = library.llama_model_load_from_file(str(self._file).encode(), settings)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {self._file}")
        self._num_logits = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        package = type(self).package
        return f"{package} {version(package)}"

    def _set_model(self, settings: Any) -> None:
        """Sets what only this library's model has."""
        has_amx = b"AMX_INT8 = 1" in self._library.llama_print_system_info()
        settings.use_extra_bufts = not (has_amx and self._weights in ("q8_0", "q4_0"))

    def _set_context(self, settings: Any) -> None:
        """Sets what only this library's context has."""
        settings.kv_unified = False
        settings.flash_attn_type = 1
        settings.no_perf = True

    def _clear(self) -> None:
        """Empties the K/V."""
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), False)  # noqa: FBT003 (theirs)

    def _start(self) -> Any:
        """The initialized library. It prints errors only."""
        if self._library is not None:
            return self._library
        import llama_cpp

        def report(level: int, text: bytes, _: Any) -> None:
            if level == _ERROR_LEVEL:
                print(text.decode(errors="replace"), end="")

        self._log = llama_cpp.llama_log_callback(report)  # kept: the library holds no reference
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self._library = llama_cpp
        return self._library

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """Prefills prompt by prompt, then decodes all sequences together."""
        library, length = self._library, len(prompts[0])
        self._make_context(length + new, len(prompts))
        self._clear()
        batch = library.llama_batch_init(max(length, len(prompts)), 0, 1)
        try:
            rows: list[list[int]] = []
            for sequence, prompt in enumerate(prompts):
                self._decode(batch, [(token, at, sequence, at == length - 1) for at, token in enumerate(prompt)])
                rows.append([self._best(-1)])
            for step in range(1, new):
                position = length + step - 1
                self._decode(batch, [(row[-1], position, sequence, True) for sequence, row in enumerate(rows)])
                for index, row in enumerate(rows):
                    row.append(self._best(index))
            return rows
        finally:
            library.llama_batch_free(batch)

    def score(self, windows: Sequence[Window]) -> float:
        """Window by window, with the logits of the tokens before the scored ones."""
        longest = max(len(ids) for ids, _ in windows)
        self._make_context(longest, 1)
        batch = self._library.llama_batch_init(longest, 0, 1)
        nats = 0.0
        try:
            for ids, scored in windows:
                self._clear()
                first = len(ids) - 1 - scored
                self._decode(batch, [(token, at, 0, at >= first) for at, token in enumerate(ids[:-1])])
                logits = np.stack([self._logits(at) for at in range(first, len(ids) - 1)])
                nats += nats_of(logits, ids, scored)
        finally:
            self._library.llama_batch_free(batch)
        return nats

    def _make_context(self, length: int, sequences: int) -> None:
        """Creates a context of this size, or reuses it: its creation is not timed."""
        room = -(-length // _ROOM_MULTIPLE) * _ROOM_MULTIPLE
        if self._context_key == (room, sequences):
            return
        library = self._library
        if self._context is not None:
            library.llama_free(self._context)
            self._context, self._context_key = None, (0, 0)
        settings = library.llama_context_default_params()
        settings.n_ctx = room * sequences
        settings.n_batch = max(room, _MICRO_BATCH)
        settings.n_ubatch = _MICRO_BATCH
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = self._options.threads
        if self._kv:
            settings.type_k = settings.type_v = _Q8_0
        self._set_context(settings)
        context = library.llama_init_from_model(self._model, settings)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {sequences} x {room} tokens")
        self._context, self._context_key = context, (room, sequences)

    def _decode(self, batch: Any, feeds: Iterable[_Fed]) -> None:
        count = 0
        for count, (token, position, sequence, is_wanted) in enumerate(feeds, 1):
            at = count - 1
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = is_wanted
        batch.n_tokens = count
        if code := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _best(self, index: int) -> int:
        return int(self._logits(index).argmax())

    def _logits(self, index: int) -> npt.NDArray[np.float32]:
        """A view, until the next call, of the logits after a token of the last batch."""
        logits = self._library.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(logits, (self._num_logits,))


if __name__ == "__main__":
    main(LlamaCpp)

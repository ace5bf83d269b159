"""What an exported model *is* on disk: one folder, its manifest, its graphs' signatures, its checksums.

The exporter writes an artifact, the server reads it and nothing else. Golden cases (`model.spec.golden`) prove the
graphs' outputs. Standard library only.

    manifest.json      the `Manifest`
    decoder.onnx       + decoder.onnx.data
    encoder.onnx       + encoder.onnx.data, encoder-decoder only
    explain.onnx       optional; its weights are in decoder.onnx.data and encoder.onnx.data
    move.onnx          paged layout only: copies K/V within the caches, has no weights
    tokenizer.json     (+ target_tokenizer.json where source and target differ)
    chat.json          if the model has a chat template (`model.spec.chat`)
    golden_texts.json  what the checkpoint's tokenizers and template made of fixed texts (`model.spec.golden_texts`)
    golden.npz         inputs and PyTorch's outputs, in float32 whatever the graphs' precision; checksums of the other
                       files and the manifest's fields (`model.spec.golden_origin`)
    attention.npz      the same for explain.onnx: PyTorch's attention weights
    parity.json        how the exported graphs compared with them, and the tolerance of their precision

`manifest` has the types and the JSON, `signatures` the graphs' inputs and outputs, `checks` reads and verifies.
"""

from model.spec.artifact.checks import (
    MAX_ARRAYS_BYTES,
    MAX_CHAT_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_OTHER_BYTES,
    MAX_TEXTS_BYTES,
    MAX_TOKENIZER_BYTES,
    ArtifactError,
    Stamp,
    hash_file,
    load,
    read_manifest,
    stamp,
)
from model.spec.artifact.manifest import (
    BLOCK_SIZE,
    CHAT,
    CPU_PRECISIONS,
    CUDA_PRECISIONS,
    DECODER,
    ENCODER,
    EXPLAIN,
    GOLDEN,
    GOLDEN_ATTENTION,
    GOLDEN_TEXTS,
    MANIFEST,
    MIN_BLOCK_SIZE,
    MOVE,
    PARITY,
    PREFILL,
    TARGET_TOKENIZER,
    TOKENIZER,
    AttentionKind,
    Device,
    FileEntry,
    GraphSpec,
    KVFormat,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
    TensorSpec,
)
from model.spec.artifact.signatures import (
    MAX_CANDIDATES,
    attention_layers,
    attention_output,
    decoder_signature,
    encoder_signature,
    explain_signature,
    paged_decoder_signature,
    paged_encoder_signature,
    paged_move_signature,
)

__all__ = [
    "BLOCK_SIZE", "CHAT", "CPU_PRECISIONS", "CUDA_PRECISIONS", "DECODER", "ENCODER", "EXPLAIN", "GOLDEN",
    "GOLDEN_ATTENTION", "GOLDEN_TEXTS", "MANIFEST", "MAX_ARRAYS_BYTES", "MAX_CANDIDATES", "MAX_CHAT_BYTES",
    "MAX_MANIFEST_BYTES", "MAX_OTHER_BYTES", "MAX_TEXTS_BYTES", "MAX_TOKENIZER_BYTES", "MIN_BLOCK_SIZE", "MOVE",
    "PARITY", "PREFILL", "TARGET_TOKENIZER", "TOKENIZER", "ArtifactError", "AttentionKind", "Device", "FileEntry",
    "GraphSpec", "KVFormat", "KVLayout", "KVPrecision", "Manifest", "Precision", "Stamp", "TensorSpec",
    "attention_layers", "attention_output", "decoder_signature", "encoder_signature", "explain_signature",
    "hash_file", "load", "paged_decoder_signature", "paged_encoder_signature", "paged_move_signature",
    "read_manifest", "stamp",
]  # fmt: skip

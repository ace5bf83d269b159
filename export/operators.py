"""The project's own operators, domain `onward`: each is defined by a function of standard operators in the graph.

Where a kernel exists (`model.kernels`), it computes the node. Elsewhere ONNX Runtime expands the node to the function's
nodes, and computes what depends on weights alone once, at load time. One file thus runs everywhere.

    Linear(rows [..., K], weight [N, K]) → [..., N]
        Rows times a float32 matrix in PyTorch's layout.

    Bf16Linear(rows [..., K], weight [N, K] bfloat16) → [..., N]
        The same with a matrix in bfloat16. Rows stay float32.

    Int8Linear(rows [..., K], panels, scales [N]) → [..., N]
        Rows times an int8 matrix. Each row is quantized to bytes with a scale of its own:

            scale = max(max |x|, tiny) · step        byte = round(x / scale) + zero
            y = Σ (byte - zero) · weight · column scale · scale

        `panels` `[⌈N / 32⌉, ⌈K / 4⌉, 32, 4] int8` is the matrix `[K, N]` in panels of 32 columns, four rows of K
        adjacent, padded with zeros. Kernel and function give the same bits.

    Int4Linear(rows [..., K], panels, scales) → [..., N]
        Rows times a matrix of four bits per weight, in blocks of 32 along K. Its function is `MatMulNBits`,
        which quantizes rows block by block; the kernel quantizes whole rows, to signed bytes:

            y = Σ over blocks (Σ byte · (code - 8) · block scale) · scale

        `panels` `[⌈N / 16⌉, K / 32, 4, 16, 4] uint8` has column n's code of k = 32 b + 8 i + j at
        `[n / 16, b, i, n % 16, j]` in the low bits, that of k + 4 in the high ones; `scales`, in float16, are
        `[⌈N / 16⌉, K / 32, 16]`. Columns past N are zeros.

    BiasedLinear, BiasedBf16Linear, BiasedInt8Linear, BiasedInt4Linear
        The same with one more input, a bias `[N]`, which is added last.

    LinearGelu, BiasedLinearGelu, Int8LinearGelu and so on
        Any of these eight followed by GELU in its tanh approximation.

    Gather(ids [...], weight), Bf16Gather(ids, weight), Int8Gather(ids, panels, scales), Int4Gather(ids, panels, scales)
            → [..., K]
        Columns of the matrix of a `Linear`, `Bf16Linear` and so on, as float32: token embeddings, whose matrix a tied
        head shares. Kernel and function give the same bits; ids must be those of columns.

    SwiGLU(rows [..., 2 F]) → [..., F]
        silu(gate) · up of each row's first and second half (Shazeer, 2020).

    Int8LinearSwiGLU, BiasedInt8LinearSwiGLU, Int4LinearSwiGLU, BiasedInt4LinearSwiGLU
        Any of these four followed by SwiGLU; half of N is a whole number of panels.

    AddRMSNorm(left, right, weight), AddLayerNorm(left, right, weight, bias) → left + right, and its norm
        The end of one residual block and the norm that begins the next.

    GroupQueryAttention(query, key?, value?, past_key, past_value, last, total, cosines?, sines?)
            → output, present_key, present_value
        The operator of this name of `com.microsoft` with float32 K/V; that is also its function.

    Int8CacheAttention(query, key?, value?, past_key, past_value, last, total, cosines?, sines?, sinks?,
                       key_scales [1, Hkv, 1, D], value_scales) → output, present_key, present_value
        The same over int8 K/V with a scale per channel. Kernel and function quantize new K/V alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from export.panels import INT4_PANEL_COLUMNS, PANEL_COLUMNS

DOMAIN = "onward"
CONTRIB = "com.microsoft"
LINEAR = "Linear"
INT8_LINEAR = "Int8Linear"
INT4_LINEAR = "Int4Linear"
BF16_LINEAR = "Bf16Linear"
GATHER = "Gather"
BF16_GATHER = "Bf16Gather"
INT8_GATHER = "Int8Gather"
INT4_GATHER = "Int4Gather"
BIASED = "Biased"
"""Prefix of an operator's name with a bias."""
GELU = "Gelu"
"""Suffix of an operator's name followed by GELU."""
ATTENTION = "GroupQueryAttention"
INT8_ATTENTION = "Int8CacheAttention"
SWIGLU = "SwiGLU"
ADD_RMS_NORM = "AddRMSNorm"
ADD_LAYER_NORM = "AddLayerNorm"

HEAD_DIM_MULTIPLE = 16
"""Head widths of attention by the project's own operator are multiples of this."""
LEAST_PEAK = np.float32(1e-30)
"""Lower bound of a row's largest magnitude: a row of zeros stays zero without a division by zero."""

# Inputs of the contrib operator, by its own names.
ATTENTION_INPUTS = (
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
)
UNUSED_INPUTS = ("position_ids", "attention_bias")
INT8_INPUTS = ("head_sink", "k_scale", "v_scale")
ATTENTION_OUTPUTS = ("output", "present_key", "present_value")
ATTENTION_ATTRIBUTES = ("num_heads", "kv_num_heads", "do_rotary", "local_window_size")
INT8_ATTRIBUTES: dict[str, Any] = {
    "k_quant_type": b"PER_CHANNEL",
    "v_quant_type": b"PER_CHANNEL",
    "kv_cache_bit_width": 8,
}
PRODUCTS = (LINEAR, BF16_LINEAR, INT8_LINEAR, INT4_LINEAR)
LINEARS = frozenset(f"{bias}{kind}" for bias in ("", BIASED) for kind in PRODUCTS)
"""The products."""
GATED_COLUMNS = {
    f"{bias}{kind}": 2 * columns
    for bias in ("", BIASED)
    for kind, columns in ((INT8_LINEAR, PANEL_COLUMNS), (INT4_LINEAR, INT4_PANEL_COLUMNS))
}
"""The products that take SwiGLU in, and what their columns must be a multiple of."""

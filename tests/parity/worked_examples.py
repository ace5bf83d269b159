"""The formulas of attention in NumPy: the oracle for torch, ONNX Runtime and the lessons' numbers.

Plain float64, with loops over tokens and heads where the lecture notes have sums; their numbers are in `lessons.notes`.
Sinusoids are in radians, as in the paper (the notes computed in degrees), and scores are divided by √d_k.

Additive scores are after Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate"
(2015).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Position 1 of four numbers, in radians, as the paper computes it.
POSITION_1_IN_RADIANS = np.array([0.841, 0.540, 0.010, 1.000])


def softmax(scores: Array) -> Array:
    """exp(s) / Σ exp(s) over the last axis, shifted by the maximum so that nothing overflows."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def mask_above_diagonal(length: int) -> Array:
    """The notes' B: 0 on and below the diagonal, -∞ above."""
    return np.triu(np.full((length, length), -np.inf), k=1)


def attention(q: Array, k: Array, v: Array, mask: Array | float = 0.0) -> Array:
    """softmax((QKᵀ + B)/√d_k)V for one head: `[S, d_k]`, `[T, d_k]`, `[T, d_v]` → `[S, d_v]`."""
    return softmax((q @ k.T + mask) / np.sqrt(q.shape[-1])) @ v


def attention_word_by_word(x: Array, w_q: Array, w_k: Array, w_v: Array) -> Array:
    """The same without a matrix in sight: one word's query against every word's key, then a weighted sum of values."""
    rows = []
    for word in x:
        q = word @ w_q
        scores = np.array([q @ (other @ w_k) / np.sqrt(len(q)) for other in x])
        rows.append(sum(weight * (other @ w_v) for weight, other in zip(softmax(scores), x, strict=True)))
    return np.stack(rows)


def additive_scores(q: Array, k: Array, v: Array) -> Array:
    """e_ij = vᵀtanh(q_i + k_j), term by term: `[S, D]`, `[T, D]`, `[D]` → `[S, T]`."""
    scores = np.zeros((len(q), len(k)))
    for i in range(len(q)):
        for j in range(len(k)):
            for n in range(len(v)):
                scores[i, j] += v[n] * np.tanh(q[i, n] + k[j, n])
    return scores


def align_and_translate(states: Array, annotations: Array, w_a: Array, u_a: Array, v_a: Array) -> tuple[Array, Array]:
    """Bahdanau et al. (2015), section 3.1 and appendix A.1.2: each decoder state's alignment to the annotations.

    e_ij = v_aᵀtanh(W_a s_i + U_a h_j); α_ij = exp(e_ij) / Σ_k exp(e_ik); c_i = Σ_j α_ij h_j. Matrices multiply from the
    left, as the paper has it. Returns α and c.
    """
    energies = np.array([[v_a @ np.tanh(w_a @ state + u_a @ note) for note in annotations] for state in states])
    alignment = softmax(energies)
    return alignment, np.stack([sum(a * note for a, note in zip(row, annotations, strict=True)) for row in alignment])


def multi_head(x: Array, heads: list[tuple[Array, Array, Array]], w_o: Array) -> Array:
    """Concat(head_1, …, head_h)W^O, head_i attending with its own W^Q, W^K, W^V; W^O is `[h * d_v, d]`."""
    outputs = [attention(x @ w_q, x @ w_k, x @ w_v) for w_q, w_k, w_v in heads]
    return np.concatenate(outputs, axis=-1) @ w_o


def layer_norm(x: Array, gamma: Array, beta: Array, epsilon: float) -> Array:
    """LN(x) = γ(x - μ)/√(σ² + ε) + β."""
    return gamma * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) + beta


def feed_forward(x: Array, w_1: Array, b_1: Array, w_2: Array, b_2: Array) -> Array:
    """FFN(x) = max(0, xW_1 + b_1)W_2 + b_2."""
    return np.maximum(0.0, x @ w_1 + b_1) @ w_2 + b_2


def position_vector(position: int, width: int) -> Array:
    """PE(i, 2j) = sin(i / 10000^(2j/d)), PE(i, 2j+1) = cos(the same), element by element."""
    vector = np.empty(width)
    for pair in range(width // 2):
        angle = position / 10000.0 ** (2 * pair / width)
        vector[2 * pair], vector[2 * pair + 1] = np.sin(angle), np.cos(angle)
    return vector

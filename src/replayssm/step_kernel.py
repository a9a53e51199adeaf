"""What a step brings, on a GPU: its arguments as kernels take them, the convolution, and the records appended.

Layouts inside a slot are dense; the stride from slot to slot may be anything, and slot arithmetic is int64.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.arithmetic_kernel import sigmoid, store_parts


class Field(NamedTuple):
    """A caller's tensor [B, T, ...], dense behind T, with its strides from row to row and token to token."""

    data: Tensor
    row: int
    token: int


class Pool(NamedTuple):
    """A tensor of the cache [S, ...], dense behind S, with its stride from slot to slot."""

    data: Tensor
    slot: int


class Ring(NamedTuple):
    """The pools of ring.Records and the convolution's; None where they hold nothing."""

    k: Pool
    v: Pool
    g: Pool
    w: Pool
    norm: Pool
    back: Pool | None
    conv: Pool | None


class Inputs(NamedTuple):
    """What a step brings: convolution inputs and raw gates, or (without weights) q, k, v, g, w ready to be used."""

    q: Field
    k: Field
    v: Field
    g: Field | None
    w: Field


class LayerWeights(NamedTuple):
    """Parameters of convolution and gates; scale, low and high as the recurrence's `gates` uses them.

    All None where inputs are ready to be used.
    """

    conv_weight: Tensor | None = None  # [C, W] with its strides; fastest where that of C is 1
    conv_channel: int = 0
    conv_tap: int = 0
    conv_bias: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    scale: float | None = None
    low: float | None = None
    high: float | None = None


@triton.jit
def store_query(t, i, o_k, b_t, m_k, K: tl.constexpr, P: tl.constexpr):
    """A carried query, number i: as it is, or its parts (where t is bf16)."""
    if t.dtype.element_ty == tl.bfloat16:
        store_parts(t + (i * K + o_k) * P, b_t, m_k, 1, P)
    else:
        tl.store(t + i * K + o_k, b_t, mask=m_k)


@triton.jit
def load_row(table, i_b, B):
    """Column i_b of a step's table: slot, ring_start, num_committed, tokens, conv_end, and the caller's row."""
    return (
        tl.load(table + i_b).to(tl.int64), tl.load(table + B + i_b), tl.load(table + 2 * B + i_b),
        tl.load(table + 3 * B + i_b), tl.load(table + 5 * B + i_b), tl.load(table + 6 * B + i_b).to(tl.int64),
    )  # fmt: skip


@triton.jit
def channels(
    field, conv, weights, parent, row, i, slot, end, o_c, m_c, FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Channels o_c of a field for token i: as the recurrence takes them, fp32, rounded as activations are; and raw.

    With weights: y = silu(bias + sum_d weight[:, W - 1 - d] x_d), x_0 the token's input, x_d the one d before it:
    another token's of the step, or one of the convolution's ring of L places, whose channels begin at FIRST for this
    field.
    """
    p_x = field.data + row * field.row + o_c
    b_x = tl.load(p_x + i * field.token, mask=m_c, other=0.0)
    b_y = b_x
    if weights.conv_weight is not None:
        o_w = FIRST + o_c
        p_pool = conv.data + slot * conv.slot + o_w
        p_w = weights.conv_weight + o_w * weights.conv_channel
        b_sum = b_x.to(tl.float32) * tl.load(p_w + (W - 1) * weights.conv_tap, mask=m_c, other=0.0).to(tl.float32)
        at = i
        for d in tl.static_range(1, W):
            if parent is not None:
                # behind a root come the committed inputs, -1 the newest
                at = tl.where(at >= 0, tl.load(parent + row * T + tl.maximum(at, 0)), at - 1)
            else:
                at = at - 1
            p_d = p_pool + (end + at + L) % L * C
            if T > 1:
                p_d = tl.where(at < 0, p_d, p_x + at * field.token)
                b_d = tl.load(p_d, mask=m_c, other=0.0).to(tl.float32)
            else:
                b_d = tl.load(p_d, mask=m_c & (at < 0), other=0.0).to(tl.float32)
            b_sum += b_d * tl.load(p_w + (W - 1 - d) * weights.conv_tap, mask=m_c, other=0.0).to(tl.float32)
        if weights.conv_bias is not None:
            b_sum += tl.load(weights.conv_bias + o_w, mask=m_c, other=0.0).to(tl.float32)
        b_y = (b_sum * sigmoid(b_sum)).to(b_x.dtype)
    return b_y.to(tl.float32), b_x


@triton.jit
def keep(
    conv, weights, slot, end, i, o_c, b_x, m_c, FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    """Raw inputs of token i into the convolution's ring, for later steps."""
    if weights.conv_weight is not None:
        tl.store(conv.data + slot * conv.slot + (end + i) % L * C + FIRST + o_c, b_x, mask=m_c)


@triton.jit
def append_key(
    ring, weights, slot, end, place, i_g, o_k, b_k, b_x, m_k, FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Key of a group into the ring, and the raw inputs it came from, channels FIRST on, into the convolution's."""
    keep(ring.conv, weights, slot, end, 0, i_g * K + o_k, b_x, m_k, FIRST, C, L)
    p_k = ring.k.data + slot * ring.k.slot + (i_g * R + place) * K + o_k
    tl.store(p_k, b_k.to(ring.k.data.dtype.element_ty), mask=m_k)


@triton.jit
def append_value(
    ring, weights, slot, end, place, o_c, b_v, b_x, m_c, FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The same of value channels o_c."""
    keep(ring.conv, weights, slot, end, 0, o_c, b_x, m_c, FIRST, C, L)
    p_v = ring.v.data + slot * ring.v.slot + (o_c // V * R + place) * V + o_c % V
    tl.store(p_v, b_v.to(ring.v.data.dtype.element_ty), mask=m_c)


@triton.jit
def ancestors(parent, row, W: tl.constexpr, T: tl.constexpr):
    """Of each of a tree's T tokens the W - 1 before it, the nearest first; -1, -2, ... are committed, -1 the newest.

    Looked up once for all channels: each is a chain of loads.
    """
    found = ()
    for i in tl.static_range(T):
        at, path = i, ()
        for _ in tl.static_range(W - 1):
            at = tl.where(at >= 0, tl.load(parent + row * T + tl.maximum(at, 0)), at - 1)
            path = path + (at,)  # type: ignore[assignment]
        found = found + (path,)  # type: ignore[assignment]
    return found


@triton.jit
def convolved(
    field, conv, weights, paths, row, slot, end, o_c, m_c, length, FIRST: tl.constexpr, C: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """What `channels` says of each of T tokens, as a tuple, both as activations; every weight is loaded once.

    All loads come before any store, so that none waits for one; those of a chain (no `paths`, see ancestors) once.
    """
    p_x = field.data + row * field.row + o_c
    p_pool = conv.data + slot * conv.slot + FIRST + o_c if weights.conv_weight is not None else p_x
    raw, found, taps, old = (), (), (), ()
    for i in tl.static_range(T):
        b_x = tl.load(p_x + i * field.token, mask=m_c & (i < length), other=0.0)
        raw = raw + (b_x,)  # type: ignore[assignment]
    if weights.conv_weight is None:
        for i in tl.static_range(T):
            found = found + ((raw[i], raw[i]),)  # type: ignore[assignment]
        return found
    p_w = weights.conv_weight + (FIRST + o_c) * weights.conv_channel
    for d in tl.static_range(W):
        b_w = tl.load(p_w + (W - 1 - d) * weights.conv_tap, mask=m_c, other=0.0).to(tl.float32)
        taps = taps + (b_w,)  # type: ignore[assignment]
    for d in tl.static_range(1, W):
        b_x = tl.load(p_pool + (end + L - d) % L * C, mask=m_c, other=0.0)
        old = old + (b_x,)  # type: ignore[assignment]
    for i in tl.static_range(T):
        b_sum = taps[0] * raw[i].to(tl.float32)  # type: ignore[misc]
        for d in tl.static_range(1, W):
            if paths is not None:
                at = paths[i][d - 1]
                p_d = tl.where(at < 0, p_pool + (end + at + L) % L * C, p_x + at * field.token)
                b_d = tl.load(p_d, mask=m_c & (i < length), other=0.0)
            elif i >= d:
                b_d = raw[i - d]
            else:
                b_d = old[d - i - 1]
            b_sum += taps[d] * b_d.to(tl.float32)
        if weights.conv_bias is not None:
            b_sum += tl.load(weights.conv_bias + FIRST + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_y = (b_sum * sigmoid(b_sum)).to(b_x.dtype)
        found = found + ((b_y, raw[i]),)
    return found


@triton.jit
def append_tokens(
    inputs, ring, weights, parent, q, row, slot, end, place, length, i_g, from_c, count,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, Q_FIRST: tl.constexpr, K_FIRST: tl.constexpr,
    V_FIRST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`append` of several tokens, from place `place` on, with NORM the keys' inverse norms as well; and q [B, G, T, K].

    For a key group and the `count` (at most BC) channels of v from `from_c` on.
    """
    C: tl.constexpr = 2 * G * K + H * V
    BX: tl.constexpr = min(BC, 128)
    o_k = tl.arange(0, BK)
    m_k, o_x = o_k < K, i_g * K + o_k
    paths = None if parent is None or W == 1 else ancestors(parent, row, W, T)
    keys = convolved(inputs.k, ring.conv, weights, paths, row, slot, end, o_x, m_k, length, K_FIRST, C, L, W, T)
    for i in tl.static_range(T):
        own, m = (place + i) % R, m_k & (i < length)
        b_k, b_x = keys[i]
        p_k = ring.k.data + slot * ring.k.slot + (i_g * R + own) * K + o_k
        tl.store(p_k, b_k.to(ring.k.data.dtype.element_ty), mask=m)
        keep(ring.conv, weights, slot, end, i, o_x, b_x, m, K_FIRST, C, L)
        if NORM:
            b_k = b_k.to(tl.float32)
            p_norm = ring.norm.data + slot * ring.norm.slot + i_g * R + own
            tl.store(p_norm, 1 / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6), mask=i < length)
    queries = convolved(inputs.q, ring.conv, weights, paths, row, slot, end, o_x, m_k, length, Q_FIRST, C, L, W, T)
    for i in tl.static_range(T):
        b_q, b_x = queries[i]
        tl.store(q + ((row * G + i_g) * T + i) * K + o_k, b_q.to(q.dtype.element_ty), mask=m_k)
        keep(ring.conv, weights, slot, end, i, o_x, b_x, m_k & (i < length), Q_FIRST, C, L)
    for part in tl.static_range(BC // BX):
        o_x = part * BX + tl.arange(0, BX)
        o_c, m_c = from_c + o_x, o_x < count
        values = convolved(inputs.v, ring.conv, weights, paths, row, slot, end, o_c, m_c, length, V_FIRST, C, L, W, T)
        for i in tl.static_range(T):
            b_v, b_x = values[i]
            p_v = ring.v.data + slot * ring.v.slot + (o_c // V * R + (place + i) % R) * V + o_c % V
            tl.store(p_v, b_v.to(ring.v.data.dtype.element_ty), mask=m_c & (i < length))
            keep(ring.conv, weights, slot, end, i, o_c, b_x, m_c & (i < length), V_FIRST, C, L)

"""Implementation `triton`: what all recurrences share on a GPU. Imported only when a cache asks for it.

One layer's step is one launch. A program holds one row, some heads of a key group and some of V:

    values  convolution of its channels of v, into the ring
    carry   convolution of q and k, gates, norms, the step's records into the ring, then t and c
            (`carry` of recurrences/<name>/kernel.py)
    read    for each of its tiles of the checkpoint: y = c_0 S0 t + c . v, skip, output gate

Programs of different rows stand at different phases, so the carries hide behind others' reads. A row whose ring is full is
folded by the program that has just read its tile (`fold` of recurrences/<name>/kernel.py): a flush costs one write of the
checkpoint and no pass of its own. Since the fold needs many registers, such rows get a launch to themselves at large batch:
a persistent grid over the list that the step's table holds, beside the end of the first launch.

Everything that changes from step to step is in device tensors (DeviceStep.table, cursors, rings). In Triton's interpreter
(TRITON_INTERPRET=1) the same kernels run on a CPU, for tests. Layouts inside a slot are dense; the stride from slot to slot
may be anything, and slot arithmetic is int64.
"""

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ring import DeviceStep, LayerState

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
    """The pools of ring.Records, and the convolution's."""

    k: Pool
    v: Pool
    g: Pool
    w: Pool
    norm: Pool
    back: Pool
    conv: Pool | None


class Inputs(NamedTuple):
    """What a step brings: convolution inputs and raw gates, or (without weights) q, k, v, g, w as they are to be used."""

    q: Field
    k: Field
    v: Field
    g: Field | None
    w: Field


class LayerWeights(NamedTuple):
    """Parameters of convolution and gates; scale, low and high as the recurrence's `gates` uses them.

    All None where inputs are ready to be used.
    """

    conv_weight: Tensor | None = None
    conv_bias: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    scale: float | None = None
    low: float | None = None
    high: float | None = None


# ---- formats ----


@triton.jit
def load_read(high, mask):
    """A tile of the checkpoint as tokens read it, fp32: in every format here the first plane."""
    return tl.load(high, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def load_update(high, low, mask, FORMAT: tl.constexpr):
    """A tile of the checkpoint as a flush starts from it, fp32."""
    if FORMAT == "split16":
        upper = tl.load(high, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return (upper + tl.load(low, mask=mask, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.load(high, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_planes(high, low, state, mask, FORMAT: tl.constexpr):
    """Encode a tile, fp32, and store its planes: the twin of the format's `encode`."""
    if FORMAT == "split16":
        bits = tl.where(state == state, state.to(tl.int32, bitcast=True), 0x7FC00000)
        upper = (bits + 0x8000) >> 16
        tl.store(high, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(low, (bits - (upper << 16)).to(tl.int16), mask=mask)
    elif FORMAT == "fp16":
        kept = tl.where(state == state, tl.minimum(tl.maximum(state, -65504.0), 65504.0), state)
        tl.store(high, kept.to(tl.float16), mask=mask)
    elif FORMAT == "bf16":
        # to nearest even by hand: the interpreter truncates
        bits = state.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(state == state, rounded, 0x7FC0)
        tl.store(high, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(high, state, mask=mask)


# ---- arithmetic ----


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), the identity above 20. log1p by its correction term, exact to an ulp where exp(x) is small."""
    u = tl.exp(tl.where(x > 20.0, 20.0, x))
    y = 1.0 + u
    return tl.where(x > 20.0, x, tl.where(y == 1.0, u, tl.log(y) * (u / (y - 1.0))))


@triton.jit
def parts(a):
    """Three bf16 numbers whose sum is the fp32 number a, to its last bit or two."""
    a0 = a.to(tl.bfloat16)
    rest = a - a0.to(tl.float32)
    a1 = rest.to(tl.bfloat16)
    return a0, a1, (rest - a1.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product(a, b, DOT: tl.constexpr):
    """a @ b of which one is fp32 and the other as activations are stored, to fp32: bf16 is exact beside bf16 parts."""
    if DOT == "tf32x3" and a.dtype == tl.bfloat16:
        b0, b1, b2 = parts(b)
        return tl.dot(a, b0) + (tl.dot(a, b1) + tl.dot(a, b2))
    elif DOT == "tf32x3" and b.dtype == tl.bfloat16:
        a0, a1, a2 = parts(a)
        return tl.dot(a0, b) + (tl.dot(a1, b) + tl.dot(a2, b))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=DOT)


# ---- a step's inputs ----


@triton.jit
def load_row(table, i_b, B):
    """Row i_b of a step: slot (int64), ring_start, num_committed, tokens, conv_end."""
    return (
        tl.load(table + i_b).to(tl.int64), tl.load(table + B + i_b), tl.load(table + 2 * B + i_b),
        tl.load(table + 3 * B + i_b), tl.load(table + 5 * B + i_b),
    )  # fmt: skip


@triton.jit
def channels(
    field, conv, weights, parent, i_b, i, slot, end, o_c, m_c, FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Channels o_c of a field for token i, fp32, rounded as activations are; raw inputs are kept for later steps.

    With weights: y = silu(bias + sum_d weight[:, W - 1 - d] x_d), x_0 the token's input, x_d the one d before it: another
    token's of the step, or one of the convolution's ring of L places, whose channels begin at FIRST for this field.
    """
    p_x = field.data + i_b.to(tl.int64) * field.row + o_c
    b_y = tl.load(p_x + i * field.token, mask=m_c, other=0.0)
    if weights.conv_weight is not None:
        o_w = FIRST + o_c
        p_pool = conv.data + slot * conv.slot + o_w
        tl.store(p_pool + (end + i) % L * C, b_y, mask=m_c)
        b_sum = b_y.to(tl.float32) * tl.load(weights.conv_weight + o_w * W + W - 1, mask=m_c, other=0.0).to(tl.float32)
        at = i
        for d in tl.static_range(1, W):
            if parent is not None:
                # behind a root come the committed inputs, -1 the newest
                at = tl.where(at >= 0, tl.load(parent + i_b * T + tl.maximum(at, 0)), at - 1)
            else:
                at = at - 1
            b_x = tl.load(p_pool + (end + at + L) % L * C, mask=m_c & (at < 0), other=0.0).to(tl.float32)
            if T > 1:
                b_x += tl.load(p_x + at * field.token, mask=m_c & (at >= 0), other=0.0).to(tl.float32)
            b_sum += b_x * tl.load(weights.conv_weight + o_w * W + W - 1 - d, mask=m_c, other=0.0).to(tl.float32)
        if weights.conv_bias is not None:
            b_sum += tl.load(weights.conv_bias + o_w, mask=m_c, other=0.0).to(tl.float32)
        b_y = (b_sum * sigmoid(b_sum)).to(b_y.dtype)
    return b_y.to(tl.float32)


@triton.jit
def append_values(
    inputs, ring, weights, parent, i_b, slot, first, before, length, end, o_c, m_c,
    FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr, W: tl.constexpr, T: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Value channels o_c of all tokens: convolution, and into the ring."""
    for i in range(T):
        m = m_c & (i < length)
        b_v = channels(inputs.v, ring.conv, weights, parent, i_b, i, slot, end, o_c, m, FIRST, C, L, W, T)
        p_v = ring.v.data + slot * ring.v.slot + (o_c // V * R + (first + before + i) % R) * V + o_c % V
        tl.store(p_v, b_v.to(ring.v.data.dtype.element_ty), mask=m)


@triton.jit
def is_seen(o_r, before, i, kin, i_b, T: tl.constexpr):
    """Which records (by number) token i of row i_b sees, itself excluded."""
    seen = o_r < before + i
    if kin is not None:
        o_t = o_r - before
        own = (o_t >= 0) & (o_t < T)
        seen &= (o_t < 0) | (tl.load(kin + (i_b * T + i) * T + tl.where(own, o_t, 0), mask=own, other=0) != 0)
    return seen


# ---- a row's step ----


@triton.jit
def decode_unit(
    high, low, ring, inputs, weights, table, parent, kin, t, c, y, skip, gate, i_b, i_u, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, W: tl.constexpr, V_FIRST: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, SPLIT: tl.constexpr,
    BC: tl.constexpr, FORMAT: tl.constexpr, CARRY: tl.constexpr, FOLD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """y = (c_0 S0 t + sum_j c_j v_j + D v) silu(z) for row i_b and unit i_u; records appended; with FOLD, a due row's fold.

    A unit is one part of SPLIT of the V of BJ heads (of one head if SPLIT > 1). Parts of a head repeat its carry.

    | Name       | Shape          | Dtype  | Dir    | Meaning                                                  |
    | high, low  | [S, H, V, K]   | format | in/out | Pools: the plane that tokens read, and the last plane    |
    | ring       | Ring           |        | in/out | records; the step's own are written                      |
    | inputs     | Inputs         |        | in     | what the step brings                                     |
    | weights    | LayerWeights   |        | in     | of convolution and gates                                 |
    | table      | [8, B]         | int32  | in     | DeviceStep.table                                         |
    | parent     | [B, T]         | int32  | in     | of a tree, else None; kin [B, T, T] likewise             |
    | t          | [B, N, T, K]   | fp32   | work   | carried queries of N = G or H heads                      |
    | c          | [B, H, T, 1+R] | fp32   | work   | weights of S0 t, then of v by record number              |
    | y          | [B, T, H, V]   |        | out    |                                                          |
    | skip       | [H, V]         |        | in     | D as a Field (strides of H and V), or None               |
    | gate       | [B, T, H, V]   |        | in     | z as a Field, or None                                    |

    Bytes: V K read_bytes + (committed + T) V itemsize per row and head, the keys and gates of as many records, the
    convolution's inputs; a fold adds the planes' write, and the read of those that tokens don't read.
    """
    J: tl.constexpr = H // G
    groups: tl.constexpr = (J + BJ - 1) // BJ
    blocks: tl.constexpr = (V + BV * SPLIT - 1) // (BV * SPLIT)  # tiles of a head in this unit
    C: tl.constexpr = 2 * G * K + H * V
    i_g, i_j, i_s = i_u // (groups * SPLIT), i_u // SPLIT % groups, i_u % SPLIT
    i_h = i_g * J + i_j * BJ
    o_p, o_t, o_k, o_v = tl.arange(0, BP), tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    m_k = o_k < K
    slot, first, before, length, end = load_row(table, i_b, B)
    # (1) values
    heads = tl.minimum(BJ, J - i_j * BJ)
    from_v = i_s * blocks * BV
    o_c = tl.arange(0, BC)
    m_c = o_c < (tl.minimum(blocks * BV, V - from_v) if SPLIT > 1 else heads * V)
    append_values(
        inputs, ring, weights, parent, i_b, slot, first, before, length, end, i_h * V + from_v + o_c, m_c,
        V_FIRST, C, L, W, T, V, R,
    )  # fmt: skip
    # (2) t and c, which other threads of this program need
    CARRY(
        inputs, ring, weights, table, parent, kin, t, c, i_b, i_g, i_j, B, T, H, G, V, K, R, L, W, BR, BK, BJ, DOT
    )  # fmt: skip
    tl.debug_barrier()
    p_v = ring.v.data + slot * ring.v.slot
    at_p, at_t = (first + o_p) % R * V, (first + before + o_t) % R * V
    m_p, m_t = o_p < before, o_t < length
    for n in range(BJ * blocks):
        h = i_h + n // blocks
        b_o = from_v + n % blocks * BV + o_v
        m_v = (b_o < V) & (n // blocks < heads)
        # (3) y = c_0 S0 t + c . v
        b_s = load_read(high.data + slot * high.slot + (h * V + b_o[:, None]) * K + o_k, m_v[:, None] & m_k)
        b_v = tl.load(p_v + h * R * V + at_p[:, None] + b_o, mask=m_p[:, None] & m_v, other=0.0).to(tl.float32)
        b_own = tl.load(p_v + h * R * V + at_t[:, None] + b_o, mask=m_t[:, None] & m_v, other=0.0).to(tl.float32)
        for i in range(T):
            b_t = tl.load(t + ((i_b * N + h // (H // N)) * T + i) * K + o_k, mask=m_k, other=0.0)
            p_c = c + ((i_b * H + h) * T + i) * (1 + R)
            b_c = tl.load(p_c + 1 + o_p, mask=m_p, other=0.0)
            c_own = tl.load(p_c + 1 + before + o_t, mask=m_t & (o_t <= i), other=0.0)
            b_y = tl.load(p_c) * tl.sum(b_s * b_t, 1)
            b_y += tl.sum(b_c[:, None] * b_v, 0) + tl.sum(c_own[:, None] * b_own, 0)
            # (4) skip and output gate
            if skip is not None:
                b_d = tl.load(skip.data + h * skip.row + b_o * skip.token, mask=m_v, other=0.0).to(tl.float32)
                b_y += b_d * tl.sum(tl.where((o_t == i)[:, None], b_own, 0.0), 0)
            if gate is not None:
                p_z = gate.data + i_b.to(tl.int64) * gate.row + i * gate.token + h * V + b_o
                b_z = tl.load(p_z, mask=m_v, other=0.0).to(tl.float32)
                b_y *= b_z * sigmoid(b_z)
            b_y = tl.where(i < length, b_y, 0.0)
            tl.store(y + ((i_b.to(tl.int64) * T + i) * H + h) * V + b_o, b_y.to(y.dtype.element_ty), mask=m_v)
        # (5) the fold, a few rows of V at a time; they are still in the L2 cache
        if FOLD is not None:
            folds = tl.load(table + 4 * B + i_b)
            if (folds > 0) & (n // blocks < heads):
                for v in range(0, BV, BF):
                    fold_tile(
                        high, low, high, low, slot, ring, slot, first, folds, h,
                        from_v + n % blocks * BV + v + tl.arange(0, BF), H, G, V, K, R, BP, BK, FORMAT, FORMAT, FOLD, DOT,
                    )  # fmt: skip


@triton.jit
def decode_kernel(
    high, low, ring, inputs, weights, table, parent, kin, t, c, y, skip, gate,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, W: tl.constexpr, V_FIRST: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, SPLIT: tl.constexpr,
    BC: tl.constexpr, FORMAT: tl.constexpr, CARRY: tl.constexpr, FOLD: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """decode_unit for every unit and row: grid (units, B). Without FOLD, rows that are due are left out."""
    if PDL:
        gdc_launch_dependents()
    i_u, i_b, B = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if tl.load(table + i_b) < 0:
        o_y = i_u * BC + tl.arange(0, BC)
        while i_u * BC < T * H * V:
            o_y = i_u * BC + tl.arange(0, BC)
            p_y = y + i_b.to(tl.int64) * T * H * V + o_y
            tl.store(p_y, tl.zeros([BC], tl.float32).to(y.dtype.element_ty), mask=o_y < T * H * V)
            i_u += tl.num_programs(0)
    elif FOLD is not None or tl.load(table + 4 * B + i_b) == 0:
        decode_unit(
            high, low, ring, inputs, weights, table, parent, kin, t, c, y, skip, gate, i_b, i_u, B,
            T, H, G, N, V, K, R, L, W, V_FIRST, BP, BT, BR, BK, BF, BJ, BV, SPLIT, BC, FORMAT, CARRY, FOLD, DOT,
        )  # fmt: skip


@triton.jit
def due_kernel(
    high, low, ring, inputs, weights, table, parent, kin, t, c, y, skip, gate, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, W: tl.constexpr, V_FIRST: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, SPLIT: tl.constexpr,
    BC: tl.constexpr, FORMAT: tl.constexpr, CARRY: tl.constexpr, FOLD: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """decode_unit for the rows that are due: a persistent grid over the step's list of them.

    With PDL it begins when the last programs of decode_kernel have begun, which work on other rows. It must not end
    before they do, hence the wait.
    """
    units: tl.constexpr = G * ((H // G + BJ - 1) // BJ) * SPLIT
    item = tl.program_id(0)
    items = tl.load(table + 7 * B) * units
    while item < items:
        decode_unit(
            high, low, ring, inputs, weights, table, parent, kin, t, c, y, skip, gate,
            tl.load(table + 6 * B + item // units), item % units, B,
            T, H, G, N, V, K, R, L, W, V_FIRST, BP, BT, BR, BK, BF, BJ, BV, SPLIT, BC, FORMAT, CARRY, FOLD, DOT,
        )  # fmt: skip
        item += tl.num_programs(0)
    if PDL:
        gdc_wait()


@triton.jit
def fold_tile(
    high, low, out_high, out_low, i_out, ring, slot, first, count, i_h, o_v,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr, FOLD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows o_v of one head's state after `count` records, from planes of FORMAT to planes of OUT."""
    o_k = tl.arange(0, BK)
    at = (i_h * V + o_v[:, None]) * K + o_k
    mask = (o_v < V)[:, None] & (o_k < K)
    b_s = load_update(high.data + slot * high.slot + at, low.data + slot * low.slot + at, mask, FORMAT)
    b_s = FOLD(b_s, ring, slot, first, count, i_h, o_v, H, G, V, K, R, BR, BK, DOT)
    store_planes(out_high.data + i_out * out_high.slot + at, out_low.data + i_out * out_low.slot + at, b_s, mask, OUT)


@triton.jit
def fold_kernel(
    high, low, out_high, out_low, ring, slots, start, counts,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    BF: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr, FOLD: tl.constexpr,
    IN_PLACE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The state of n slots after their first `counts` records, in place or as [n, H, V, K]: flush and materialize.

    One program per slot, head and tile of V. In place, slots without records are left alone.
    """
    i_n, i_h, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, count = tl.load(slots + i_n).to(tl.int64), tl.load(counts + i_n)
    if IN_PLACE and ((slot < 0) | (count == 0)):
        return
    i_out = slot if IN_PLACE else i_n.to(tl.int64)
    fold_tile(
        high, low, out_high, out_low, i_out, ring, slot, tl.load(start + i_n), count, i_h,
        i_v * BF + tl.arange(0, BF), H, G, V, K, R, BR, BK, FORMAT, OUT, FOLD, DOT,
    )  # fmt: skip


@triton.jit
def convolve_kernel(
    x, conv, weights, table, parent, y,
    T: tl.constexpr, C: tl.constexpr, L: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The convolution by itself: y [B, T, C], zero for padding; one program per row and BC channels."""
    i_b, i_c, B = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    slot, _, _, length, end = load_row(table, i_b, B)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = (o_c < C) & (slot >= 0)
    for i in range(T):
        m = m_c & (i < length)
        b_y = channels(x, conv, weights, parent, i_b, i, tl.maximum(slot, 0), end, o_c, m, 0, C, L, W, T)
        b_y = tl.where(m, b_y, 0.0).to(y.dtype.element_ty)
        tl.store(y + (i_b.to(tl.int64) * T + i) * C + o_c, b_y, mask=o_c < C)


# ---- launches ----


class Tile(NamedTuple):
    """How the work of a row is cut; powers of two.

    Attributes:
        heads: heads of a program.
        split: programs that share a head's V; more than 1 with one head only.
        v: rows of V that are read at a time.
        fold_v: rows of V that are folded at a time, at most v.
        warps: warps of a program.
    """

    heads: int
    split: int
    v: int
    fold_v: int
    warps: int


class Launch(NamedTuple):
    """Launch choices of one geometry: rows that are not due, and those that are.

    Attributes:
        programs: persistent programs for rows that are due; 0: one launch does both, cut as `rows` says.
    """

    rows: Tile
    due: Tile
    programs: int


def launch(recurrence: Any, geometry: Any, rows: int, tokens: int, read_bytes: int) -> Launch:
    """Launch choices, found on an NVIDIA H200 with `python -m replayssm.bench launches` (docs/log.md)."""
    H, G, V, K = geometry
    heads, wide = triton.next_power_of_2(H // G), triton.next_power_of_2(V)
    heads = 1 if recurrence.channel_gate else min(heads, 4)
    read_v = min(wide, 64 if V <= 64 else 32)
    tile = Tile(heads=heads, split=1, v=read_v, fold_v=min(read_v, 16), warps=4)
    if rows * H <= 2048:
        return Launch(Tile(heads=1, split=max(1, wide // read_v), v=read_v, fold_v=min(read_v, 16), warps=4), tile, 0)
    return Launch(tile, tile, 132 * 3)


def dot_precision() -> str:
    """How fp32 products are formed: three products of parts on NVIDIA's tensor cores, plain fp32 elsewhere."""
    return "ieee" if INTERPRETED or torch.version.hip else "tf32x3"


def dependent_launches(device: torch.device) -> bool:
    """Whether a launch may begin before the one in front of it has ended: NVIDIA, Hopper or newer."""
    return not INTERPRETED and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def pools(layer: LayerState) -> Ring:
    """A layer's pools as kernels take them."""
    k, v, g, w, norm, back = (Pool(pool, pool.stride(0)) for pool in layer.ring)
    return Ring(k, v, g, w, norm, back, Pool(layer.conv, layer.conv.stride(0)) if layer.conv.numel() else None)


def planes(tensors: tuple[Tensor, ...]) -> tuple[Pool, Pool]:
    """The plane that tokens read, and the last one."""
    return Pool(tensors[0], tensors[0].stride(0)), Pool(tensors[-1], tensors[-1].stride(0))


def field(x: Tensor) -> Field:
    """[B, T, ...] as kernels take it; copied where what is behind T is not dense."""
    dense = x[0, 0].is_contiguous() if x.numel() else True
    x = x if dense else x.contiguous()
    return Field(x, x.stride(0), x.stride(1))


def decode(
    recurrence: Any, geometry: Any, format: str, window: int, layer: LayerState, step: DeviceStep, inputs: Inputs,
    weights: LayerWeights, skip: Tensor | None, gate: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y [B, T, H, V] of one layer in `dtype`; the step's records are appended, rows that are due are folded.

    Args:
        window: the most committed records that a step may find.
        inputs, weights: raw, or ready with no weights.
        skip: D, [H] or [H, V]; gate: z, [B, T, H, V].
    """
    (H, G, V, K), B, T = geometry, step.rows, step.tokens
    device = step.table.device
    y = torch.empty(B, T, H, V, dtype=dtype, device=device)
    if not B:
        return y
    R, module = layer.ring.w.shape[2], recurrence.kernel()
    N = H if recurrence.delta else G
    t = torch.empty(B, N, T, K, dtype=torch.float32, device=device)
    c = torch.empty(B, H, T, 1 + R, dtype=torch.float32, device=device)
    high, low = planes(layer.checkpoint)
    chosen = launch(recurrence, geometry, B, T, high.data.element_size())
    if skip is not None:
        skip = (skip[:, None] if skip.ndim == 1 else skip).expand(H, V)
    arguments = (
        high, low, pools(layer), inputs, weights, step.table, step.parent, step.kin, t, c, y,
        None if skip is None else Field(skip, *skip.stride()), None if gate is None else field(gate),
    )  # fmt: skip
    PDL = dependent_launches(device)
    sizes = {
        "T": T, "H": H, "G": G, "N": N, "V": V, "K": K, "R": R, "L": layer.conv.shape[1],
        "W": 1 if weights.conv_weight is None else weights.conv_weight.shape[1],
        "V_FIRST": 0 if recurrence.conv_order == "vkq" else 2 * G * K,
        "BP": max(16, triton.next_power_of_2(window)), "BT": triton.next_power_of_2(T),
        "BR": max(16, triton.next_power_of_2(window + T - 1)), "BK": max(16, triton.next_power_of_2(K)),
        "FORMAT": format, "CARRY": module.carry, "DOT": dot_precision(), "PDL": PDL,
    }  # fmt: skip
    fold = None if chosen.programs else module.fold
    decode_kernel[(units(geometry, chosen.rows), B)](*arguments, **sizes, **cut(geometry, chosen.rows), FOLD=fold)
    if chosen.programs:
        due_kernel[(chosen.programs,)](
            *arguments, B, **sizes, **cut(geometry, chosen.due), FOLD=module.fold,
            **({"launch_pdl": True} if PDL else {}),
        )  # fmt: skip
    return y


def units(geometry: Any, tile: Tile) -> int:
    """Programs of a row."""
    H, G, _, _ = geometry
    return G * triton.cdiv(H // G, tile.heads) * tile.split


def cut(geometry: Any, tile: Tile) -> dict[str, int]:
    """A Tile as the kernels' constants."""
    V = geometry[2]
    values = tile.heads * V if tile.split == 1 else triton.cdiv(V, tile.v * tile.split) * tile.v
    return {
        "BJ": tile.heads, "SPLIT": tile.split, "BV": tile.v, "BF": tile.fold_v, "BC": triton.next_power_of_2(values),
        "num_warps": tile.warps,
    }  # fmt: skip


def convolve(pool: Tensor, step: DeviceStep, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[B, T, C] in the dtype of x: see conv.convolve."""
    (B, T, C), W = x.shape, weight.shape[1]
    y = torch.empty(B, T, C, dtype=x.dtype, device=x.device)
    if B:
        weights = LayerWeights(weight.contiguous(), bias)
        convolve_kernel[(B, triton.cdiv(C, 256))](
            field(x), Pool(pool, pool.stride(0)), weights, step.table, step.parent, y,
            T=T, C=C, L=pool.shape[1], W=W, BC=256, num_warps=2,
        )  # fmt: skip
    return y


def fold(recurrence: Any, fmt: Any, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> Tensor:
    """The state of every slot after its first `counts` committed records: [n, H, V, K] in fp32. As batched.fold."""
    state = torch.empty(len(slots), *layer.checkpoint[0].shape[1:], dtype=torch.float32, device=slots.device)
    _launch_fold(recurrence, fmt.name, layer, slots, start, counts, (state,), "fp32")
    return state


def flush(recurrence: Any, fmt: Any, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> None:
    """Fold in place: the planes are read, folded and written by one launch; slots below 0 are left alone."""
    _launch_fold(recurrence, fmt.name, layer, slots, start, counts, layer.checkpoint, fmt.name)


def _launch_fold(
    recurrence: Any, format: str, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor,
    into: tuple[Tensor, ...], out: str,
) -> None:  # fmt: skip
    _, H, V, K = layer.checkpoint[0].shape
    G, R = layer.ring.k.shape[1:3]
    if not len(slots):
        return
    BF = 16
    fold_kernel[(len(slots), H, triton.cdiv(V, BF))](
        *planes(layer.checkpoint), *planes(into), pools(layer), slots, start, counts,
        H=H, G=G, V=V, K=K, R=R, BR=max(16, triton.next_power_of_2(R - 1)), BF=BF,
        BK=max(16, triton.next_power_of_2(K)), FORMAT=format, OUT=out, FOLD=recurrence.kernel().fold,
        IN_PLACE=into is layer.checkpoint, DOT=dot_precision(), num_warps=4,
    )  # fmt: skip

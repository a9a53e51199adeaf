"""Reading, on a GPU: y = c_0 S0 t + c . v, skip, output gate, for a row, head and tile of V at a time.

What a program needs of others it awaits by name: `ready` holds, per slot and head, the newest step that was carried (or
flushed). Where launches don't overlap, nothing is ever awaited.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.arithmetic_kernel import add_product, parts_of, sigmoid
from replayssm.formats_kernel import (
    decode_read,
    divides,
    fetch_read,
    in_bf16,
    load_part,
    read_kind,
    read_parts,
    scaled,
    summed,
)
from replayssm.step_kernel import load_row


@triton.jit
def publish(ready, table, i_b, at, B):
    """What this program has stored for column i_b is in memory: the slot's ready gets the step's number at `at`."""
    tl.debug_barrier()
    slot, number = tl.load(table + i_b).to(tl.int64), tl.load(table + 7 * B + i_b)
    tl.atomic_xchg(ready.data + slot * ready.slot + at, number, sem="release")


@triton.jit
def unit_of(i_h, J: tl.constexpr, BJ: tl.constexpr):
    """The first of the heads that are carried with head i_h, J to a key group and BJ at a time: its place in ready."""
    return i_h // J * J + i_h % J // BJ * BJ


@triton.jit
def await_number(ready, slot, number, at):
    """Until place `at` was published. Who publishes runs before, or (PDL) has begun before, in all its programs."""
    while tl.atomic_add(ready.data + slot * ready.slot + at, 0, sem="acquire") != number:
        pass


@triton.jit
def load_columns(p, o, BN: tl.constexpr, P: tl.constexpr):
    """Parts side by side (store_parts) of entries o as a tile [len(o), BN] for a product: zero beyond the P."""
    o_n = tl.arange(0, BN)
    return tl.load(p + o[:, None] * P + o_n, mask=o_n < P, other=0.0)


@triton.jit
def multiplied(
    b_y, b_s, p_t, from_k, length,
    T: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """b_y + S0 t for BB columns from from_k on: b_s [BV, BB] as fetch_read has it or (PARTS below) decoded.

    b_y is [BV, BN], of tokens or (T = 1) of t's parts, by products on tensor cores. Or (T = 1, S0 not in bf16) [BV].
    """
    o_k, o_n = from_k + tl.arange(0, BB), tl.arange(0, BN)
    if T > 1:
        PARTS: tl.constexpr = read_parts(FORMAT)
        m = o_n < length if divides(BB, K) else (o_n < length) & (o_k < K)[:, None]
        for i in tl.static_range(PT):
            b_t = tl.load(p_t + i * T * K + o_n * K + o_k[:, None], mask=m, other=0.0)
            b_y = add_product(b_y, b_s, b_t, min(PARTS, P - i), 1)
    elif in_bf16(FORMAT):
        m = o_n < PT if divides(BB, K) else (o_n < PT) & (o_k < K)[:, None]
        b_y = add_product(b_y, b_s, tl.load(p_t + o_k[:, None] * PT + o_n, mask=m, other=0.0), 1, 1)
    else:
        b_y += tl.sum(b_s.to(tl.float32) * load_part(p_t + o_k, None if divides(BB, K) else o_k < K), 1)
    return b_y


@triton.jit
def fetch_beside(
    ring, skip, gate, slot, first, before, row, i_h, i_v, V: tl.constexpr, R: tl.constexpr, BP: tl.constexpr,
    BV: tl.constexpr, FLUSHED: tl.constexpr,
):  # fmt: skip
    """Of what read_tile needs, all that is there before the carry: values of records (unless FLUSHED), D, z."""
    o_p, o_x = tl.arange(0, BP), tl.arange(0, BV)
    o_v = i_v * BV + o_x
    m_v = None if V % BV == 0 else o_v < V
    b_v, b_d, b_z = 0.0, 0.0, 0.0
    if not FLUSHED:
        m_p = (o_p < before)[:, None] if V % BV == 0 else (o_p < before)[:, None] & (o_v < V)
        p_v = ring.v.data + slot * ring.v.slot + (i_h * (R * V) + i_v * BV)
        b_v = tl.load(p_v + ((first + o_p) % R * V)[:, None] + o_x, mask=m_p, other=0.0)
    if skip is not None:
        b_d = load_part(skip.data + i_h * skip.row + o_v * skip.token, m_v)
    if gate is not None:
        b_z = load_part(gate.data + row * gate.row + i_h * V + o_v, m_v)
    return b_v, b_d, b_z


@triton.jit
def fetch_carried(
    slot, row, number, ready, t, c, ends, answer, i_h,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """What the carry left for a head, once it is there: weights of S0 t and of the own v; c, and t if it is in fp32."""
    if ready is not None:
        await_number(ready, slot, number, unit_of(i_h, H // G, BJ))
    p_ends = ends + (row * H + i_h) * 2
    b_c, b_t = 0.0, 0.0
    if answer is None:
        b_c = load_columns(c + (row * H + i_h) * (BP * P), tl.arange(0, BP), BN, P)
        if not in_bf16(FORMAT):
            o_k = tl.arange(0, BK)
            b_t = load_part(t + (row * N + i_h // (H // N)) * K + o_k, None if K == BK else o_k < K)
    return tl.load(p_ends), tl.load(p_ends + 1), b_c, b_t


@triton.jit
def read_tile(
    planes, codes, blocks, rows, beside, carried, ring, slot, first, before, row, t, answer, y, skip, gate, i_h, i_v,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, BB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = (c_0 S0 t + sum_j c_j v_j + D v) silu(z) for the caller's row `row`, head i_h, part i_v of V.

    S0 [BV, BK] comes as stored (fetch_read) and is decoded when the carry is there: few registers wait. Or (BB < BK, no
    scales) it is fetched here, BB columns at a time, STAGES such blocks on their way at most. Of a row that was flushed
    S0 t may be there already (answer); it has no records but the token's own.

    | Name          | Shape          | Dtype  | Dir | Meaning                                       |
    | beside        | fetch_beside   |        | in  |                                               |
    | ring          | Ring           |        | in  | records                                       |
    | carried       | fetch_carried  |        | in  |                                               |
    | t             | prepare_kernel |        | in  | in parts                                      |
    | answer        | prepare_kernel |        | in  | None where the checkpoint is read             |
    | y             | [B, T, H, V]   |        | out | T is 1                                        |
    | skip          | [H, V]         |        | in  | D as a Field (strides of H and V), or None    |
    | gate          | [B, T, H, V]   |        | in  | z as a Field, or None                         |

    A checkpoint in bf16 is multiplied by t's parts on tensor cores, so are the records' values by c's; any other is
    multiplied as it is. What counts is how few instructions a tile takes (docs/log.md).
    """
    b_v, b_d, b_z = beside
    decay, own, b_c, b_t = carried
    o_x = tl.arange(0, BV)
    o_v = i_v * BV + o_x
    m_v = None if V % BV == 0 else o_v < V
    p_v = ring.v.data + slot * ring.v.slot + (i_h * (R * V) + i_v * BV)
    b_own = load_part(p_v + (first + before) % R * V + o_x, m_v).to(tl.float32)
    # (1) y = c_0 S0 t + c . v
    p_t = t + (row * N + i_h // (H // N)) * (K * (P if in_bf16(FORMAT) else 1))
    if answer is not None:
        b_y = load_part(answer + (row * H + i_h) * V + o_v, m_v) * decay
    elif in_bf16(FORMAT):
        b_y = tl.zeros([BV, BN], tl.float32)
        for n in tl.range((K + BB - 1) // BB, num_stages=STAGES):
            b_s = codes if BB == BK else fetch_read(planes, slot, i_h, o_v, V, K, BB, FORMAT, n * BB)[0]
            b_y = multiplied(b_y, b_s, p_t, n * BB, 1, 1, K, P, P, BN, BB, FORMAT)
        b_y = tl.sum(add_product(b_y * decay, tl.trans(b_v), b_c, parts_of(b_v.dtype), 1), 1)
    else:
        tile, scale = decode_read(codes, blocks, rows, BV, BK, FORMAT)
        b_y = summed(tile, scale, b_t, read_kind(FORMAT)) * decay
        b_y += tl.sum(add_product(tl.zeros([BV, BN], tl.float32), tl.trans(b_v), b_c, parts_of(b_v.dtype), 1), 1)
    store_output(y, skip, gate, b_y, own, b_own, b_d, b_z, (row * H + i_h) * V + o_v, m_v)


@triton.jit
def store_output(y, skip, gate, b_y, own, b_own, b_d, b_z, at, m_v):
    """(b_y + (own + D) v) silu(z) at y's places `at`: own and b_own are the weight and value of the token's record."""
    if skip is not None:
        b_y += (b_d.to(tl.float32) + own) * b_own
    else:
        b_y += own * b_own
    if gate is not None:
        b_z = b_z.to(tl.float32)
        b_y *= b_z * sigmoid(b_z)
    if m_v is None:
        tl.store(y + at, b_y.to(y.dtype.element_ty))
    else:
        tl.store(y + at, b_y.to(y.dtype.element_ty), mask=m_v)


@triton.jit
def read_tokens(
    planes, codes, blocks, rows, ring, slot, first, before, length, row, number, ready, t, c, answer, y, skip, gate,
    i_h, i_v,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, BJ: tl.constexpr, FORMAT: tl.constexpr, BB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """read_tile of several tokens at once, by products on tensor cores.

    Products are as exact as P parts: 2 for an output of 16 bits, 3 for fp32.
    """
    KIND: tl.constexpr = read_kind(FORMAT)
    o_r, o_t, o_v = tl.arange(0, BR), tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_r, m_t, m_v = o_r < before + length, o_t < length, (o_v < V)[:, None]
    b_d, b_z = 0.0, 0.0
    if skip is not None:
        b_d = tl.load(skip.data + i_h * skip.row + o_v * skip.token, mask=o_v < V, other=0.0)
    if gate is not None:
        p_z = gate.data + row * gate.row + o_t * gate.token + i_h * V + o_v[:, None]
        b_z = tl.load(p_z, mask=m_v & m_t, other=0.0)
    if ready is not None:
        await_number(ready, slot, number, unit_of(i_h, H // G, BJ))
    p_v = ring.v.data + slot * ring.v.slot + i_h * R * V + o_v[:, None]
    b_v = tl.load(p_v + (first + o_r) % R * V, mask=m_v & m_r, other=0.0)
    p_c = c + (row * H + i_h) * (T * (1 + R)) + o_t * (1 + R)
    b_c = tl.load(p_c + 1 + o_r[:, None], mask=m_r[:, None] & m_t, other=0.0)
    # (1) y = c_0 S0 t + c . v; scales of rows multiply sums, those of blocks do not
    scale = 1.0
    if BB == BK and answer is None:
        if in_bf16(FORMAT):
            whole = codes
        else:
            whole, scale = decode_read(codes, blocks, rows, BV, BK, FORMAT)
            if KIND == "fp4" or KIND == "mxfp4":
                whole, scale = scaled(whole, scale, KIND), 1.0
    p_t = t + (row * N + i_h // (H // N)) * (PT * T * K)
    if answer is not None:
        b_y = tl.load(answer + ((row * H + i_h) * T + o_t) * V + o_v[:, None], mask=m_v & m_t, other=0.0)
    else:
        b_y = tl.zeros([BV, BT], tl.float32)
        for n in tl.range((K + BB - 1) // BB, num_stages=STAGES):
            b_s = whole if BB == BK else fetch_read(planes, slot, i_h, o_v, V, K, BB, FORMAT, n * BB)[0]
            b_y = multiplied(b_y, b_s, p_t, n * BB, length, T, K, P, PT, BT, BB, FORMAT)
    b_y *= (scale * tl.full([BV], 1.0, tl.float32))[:, None] * tl.load(p_c, mask=m_t, other=0.0)
    b_y = add_product(b_y, b_v, b_c, min(parts_of(b_v.dtype), P), P)
    # (2) skip and output gate
    if skip is not None:
        own = (o_r[:, None] == before + o_t).to(tl.float32)
        own = add_product(tl.zeros([BV, BT], tl.float32), b_v, own, min(parts_of(b_v.dtype), P), 1)
        b_y += b_d.to(tl.float32)[:, None] * own  # type: ignore[attr-defined]
    if gate is not None:
        b_z = b_z.to(tl.float32)  # type: ignore[attr-defined]
        b_y *= b_z * sigmoid(b_z)
    b_y = tl.where(m_t, b_y, 0.0)
    p_y = y + (row * T * H + i_h) * V + o_t * (H * V) + o_v[:, None]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_v & (o_t < T))


@triton.jit
def zero_tile(y, row, i_h, i_v, T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Outputs of a padding row."""
    o_v = i_v * BV + tl.arange(0, BV)
    for i in range(T):
        p_y = y + ((row * T + i) * H + i_h) * V + o_v
        tl.store(p_y, tl.zeros([BV], tl.float32).to(y.dtype.element_ty), mask=o_v < V)


@triton.jit
def fetch_part(
    planes, ring, skip, gate, slot, first, before, row, answer, i_h, i_v,
    T: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """fetch_read (unless there is an answer) and, of one token, fetch_beside."""
    codes, blocks, rows, beside = 0, 1.0, 1.0, (0.0, 0.0, 0.0)
    if answer is None:  # first: what else is loaded is waited for at once, to go through shared memory
        codes, blocks, rows = fetch_read(planes, slot, i_h, i_v * BV + tl.arange(0, BV), V, K, BK, FORMAT)
    if T == 1:
        beside = fetch_beside(ring, skip, gate, slot, first, before, row, i_h, i_v, V, R, BP, BV, answer is not None)
    return codes, blocks, rows, beside


@triton.jit
def read_part(
    planes, ring, slot, first, before, length, row, number, ready, t, c, ends, answer, y, skip, gate, i_h, i_v,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, FORMAT: tl.constexpr, BB: tl.constexpr, STAGES: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """read_tile of RUN tiles, or read_tokens; the checkpoint (unless there is an answer) is fetched before the carry is
    awaited.
    """
    tile = fetch_part(
        planes, ring, skip, gate, slot, first, before, row, answer, i_h, i_v, T, V, K, R, BP, BV, BK, FORMAT
    )  # fmt: skip
    if T > 1:
        codes, blocks, rows, _ = tile
        read_tokens(
            planes, codes, blocks, rows, ring, slot, first, before, length, row, number, ready, t, c, answer, y, skip,
            gate, i_h, i_v, T, H, G, N, V, K, R, P, PT, BR, BT, BV, BK, BJ, FORMAT, BB, STAGES,
        )  # fmt: skip
    else:
        carried = fetch_carried(
            slot, row, number, ready, t, c, ends, answer, i_h, H, G, N, K, PT, BP, BT, BK, BJ, FORMAT
        )  # fmt: skip
        for n in tl.static_range(RUN):
            codes, blocks, rows, beside = tile
            if n + 1 < RUN:  # on its way while this one is answered
                tile = fetch_part(
                    planes, ring, skip, gate, slot, first, before, row, answer, i_h, i_v + n + 1,
                    T, V, K, R, BP, BV, BK, FORMAT,
                )  # fmt: skip
            read_tile(
                planes, codes, blocks, rows, beside, carried, ring, slot, first, before, row, t, answer, y, skip, gate,
                i_h, i_v + n, H, G, N, V, K, R, PT, BP, BT, BV, BK, FORMAT, BB, STAGES,
            )  # fmt: skip


@triton.jit
def read_kernel(
    planes, ring, table, ready, t, c, ends, answer, y, skip, gate, part,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BESIDE: tl.constexpr, FORMAT: tl.constexpr,
    PDL: tl.constexpr, BB: tl.constexpr, STAGES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """read_part for every RUN tiles, head and row: grid (V / BV / RUN, H, B).

    planes: those of the format, as Pools. Bytes: V K read_bytes + (committed + T) V itemsize per row and head, and t,
    c, y. A row that is due is awaited first, where it was flushed BESIDE, by `part` rows of V; with `answer` its
    checkpoint is not read.
    """
    if PDL:
        gdc_launch_dependents()
    i_v, i_h, i_b, B = tl.program_id(0) * RUN, tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    # all at once: a trip to memory less
    slot, first, before, length, _, row = load_row(table, i_b, B)
    folds, number = tl.load(table + 4 * B + i_b), tl.load(table + 7 * B + i_b)
    if slot < 0:
        for n in tl.static_range(RUN):
            zero_tile(y, row, i_h, i_v + n, T, H, V, BV)
    else:
        if BESIDE:
            if folds > 0:
                parts = (V + part - 1) // part
                i_w = i_v * BV // part
                while i_w * part < tl.minimum((i_v + RUN) * BV, V):
                    await_number(ready, slot, number, H + i_h * parts + i_w)
                    i_w += 1
        if answer is None:
            read_part(
                planes, ring, slot, first, before, length, row, number, ready, t, c, ends, None, y, skip, gate, i_h,
                i_v, T, H, G, N, V, K, R, P, PT, BP, BR, BT, BV, BK, BJ, FORMAT, BB, STAGES, RUN,
            )  # fmt: skip
        elif folds > 0:
            read_part(
                planes, ring, slot, first, before, length, row, number, ready, t, c, ends, answer, y, skip, gate, i_h,
                i_v, T, H, G, N, V, K, R, P, PT, BP, BR, BT, BV, BK, BJ, FORMAT, BB, STAGES, RUN,
            )  # fmt: skip
        else:
            read_part(
                planes, ring, slot, first, before, length, row, number, ready, t, c, ends, None, y, skip, gate, i_h,
                i_v, T, H, G, N, V, K, R, P, PT, BP, BR, BT, BV, BK, BJ, FORMAT, BB, STAGES, RUN,
            )  # fmt: skip
    if PDL:
        if (i_b == B - 1) & (i_h == H - 1) & (tl.program_id(0) == tl.num_programs(0) - 1):
            gdc_wait()

"""Implementation `triton`: the GPU side of formats, the read kernel, and the launches of all carries and folds.

Imported only when a cache asks for it, so that `import replayssm` needs no Triton. In Triton's interpreter
(TRITON_INTERPRET=1) the same kernels run on a CPU, for tests.

Layouts inside a slot are dense; the stride from slot to slot may be anything, and slot arithmetic is int64.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats import Format
from replayssm.ring import LayerState, Records, Step

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _dot_precision() -> str:
    """How fp32 products of the fold are formed: three tf32 products on NVIDIA's tensor cores, plain fp32 elsewhere."""
    return "ieee" if INTERPRETED or torch.version.hip else "tf32x3"


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


def _tile(R: int) -> int:
    """Records that a tile must hold: at most R - 1 count or are seen at a time, since due slots flush first."""
    return triton.next_power_of_2(max(R - 1, 1))


# ---- read ----


@triton.jit
def read_kernel(
    high, v, t, c, y, slots, start, committed, plane_slot, v_slot,
    T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y = S0 t + c . v, one program per row, head and tile of V; the tile of the checkpoint is read once for all T.

    | Name       | Shape        | Dtype  | Dir | Meaning                              |
    | high       | [S, H, V, K] | format | in  | the plane that tokens read           |
    | v          | [S, H, R, V] |        | in  | the ring                             |
    | t          | [B, H, T, K] | fp32   | in  | carried queries                      |
    | c          | [B, H, T, R] | fp32   | in  | weights of v, by ring place          |
    | y          | [B, H, T, V] | fp32   | out |                                      |

    Bytes: V K read_bytes + (committed + T) V itemsize per row and head, and t, c, y.
    """
    i_b, i_h, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + i_b).to(tl.int64)
    o_r, o_v, o_k = tl.arange(0, BR), i_v * BV + tl.arange(0, BV), tl.arange(0, BK)
    m_v, m_k = o_v < V, o_k < K
    at = slot * plane_slot + (i_h * V + o_v[:, None]) * K + o_k
    b_s = load_read(high + at, m_v[:, None] & m_k)
    place = (tl.load(start + i_b) + o_r) % R
    m_r = (o_r < R) & (o_r < tl.load(committed + i_b) + T)
    p_v = v + slot * v_slot + (i_h * R + place[:, None]) * V + o_v
    b_v = tl.load(p_v, mask=m_r[:, None] & m_v, other=0.0).to(tl.float32)
    for i in range(T):
        row = (i_b * H + i_h) * T + i
        b_t = tl.load(t + row * K + o_k, mask=m_k, other=0.0)
        b_c = tl.load(c + row * R + place, mask=m_r, other=0.0)
        b_y = tl.sum(b_s * b_t, 1) + tl.sum(b_c[:, None] * b_v, 0)
        tl.store(y + row * V + o_v, b_y, mask=m_v)


def read(fmt: Format, layer: LayerState, step: Step, t: Tensor, c: Tensor) -> Tensor:
    """y [B, H, T, V] in fp32, see read_kernel."""
    B, H, T, K = t.shape
    V, R = layer.ring.v.shape[3], layer.ring.v.shape[2]
    y = torch.empty(B, H, T, V, dtype=torch.float32, device=t.device)
    high = layer.checkpoint[0]
    BV = min(64 if V <= 64 else 32, triton.next_power_of_2(V))
    read_kernel[(B, H, triton.cdiv(V, BV))](
        high, layer.ring.v, t, c, y, step.slots, step.start, step.committed,
        high.stride(0), layer.ring.v.stride(0),
        T=T, H=H, V=V, K=K, R=R, BR=_tile(R), BV=BV, BK=triton.next_power_of_2(K),
        num_warps=4,
    )  # fmt: skip
    return y


# ---- carry and fold ----


def carry(recurrence: Any, records: Records, step: Step, q: Tensor) -> tuple[Tensor, Tensor]:
    """t [B, H, T, K] and c [B, H, T, R] by ring place, fp32; rows of `back` are written. As batched.carry."""
    B, T, G, K = q.shape
    H, R = records.w.shape[1:]
    t = torch.empty(B, H, T, K, dtype=torch.float32, device=q.device)
    c = torch.empty(B, H, T, R, dtype=torch.float32, device=q.device)
    heads = H // G
    BJ = 1 if recurrence.delta else min(8, triton.next_power_of_2(heads))  # heads of one program
    recurrence.kernel().carry_kernel[(B, G * triton.cdiv(heads, BJ))](
        q.contiguous(), records.k, records.g, records.w, records.norm, records.back, t, c,
        step.slots, step.start, step.committed, step.sees,
        *(pool.stride(0) for pool in (records.k, records.g, records.w, records.norm, records.back)),
        T=T, H=H, G=G, K=K, R=R, E=records.g.shape[3], TREE=step.parent is not None,
        BR=triton.next_power_of_2(R) if recurrence.delta else _tile(R), BK=triton.next_power_of_2(K), BJ=BJ,
        num_warps=1 if recurrence.delta else 2,
    )  # fmt: skip
    return t, c


def fold(recurrence: Any, fmt: Format, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> Tensor:
    """The state of every slot after its first `counts` committed records: [n, H, V, K] in fp32. As batched.fold."""
    state = torch.empty(len(slots), *layer.checkpoint[0].shape[1:], dtype=torch.float32, device=slots.device)
    _launch_fold(recurrence, fmt, layer, slots, start, counts, (state,), "states")
    return state


def flush(recurrence: Any, fmt: Format, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> None:
    """Fold in place: the planes are read, folded and written by one launch."""
    _launch_fold(recurrence, fmt, layer, slots, start, counts, layer.checkpoint, "planes")


def _launch_fold(
    recurrence: Any,
    fmt: Format,
    layer: LayerState,
    slots: Tensor,
    start: Tensor,
    counts: Tensor,
    into: tuple[Tensor, ...],
    out: str,
) -> None:
    records, planes = layer.ring, layer.checkpoint
    _, H, V, K = planes[0].shape
    G, R = records.k.shape[1:3]
    BV = min(32, max(16, triton.next_power_of_2(V)))
    recurrence.kernel().fold_kernel[(len(slots), H, triton.cdiv(V, BV))](
        planes[0], planes[-1], into[0], into[-1],
        records.k, records.v, records.g, records.w, records.norm, records.back, slots, start, counts,
        planes[0].stride(0), into[0].stride(0),
        *(pool.stride(0) for pool in (records.k, records.v, records.g, records.w, records.norm, records.back)),
        H=H, G=G, V=V, K=K, R=R, BR=max(16, _tile(R)), BV=BV, BK=max(16, triton.next_power_of_2(K)),
        FORMAT=fmt.name, OUT=out, DOT=_dot_precision(), num_warps=4,
    )  # fmt: skip

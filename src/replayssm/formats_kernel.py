"""The storage formats in Triton: how a tile of the checkpoint is loaded for reading, for updating, and stored.

Twins of the blocks of formats.py; they agree bit for bit. A tile is BV rows of one head's state by all of its K (BK, a
power of two, masked); `planes` are all planes of a format, in its order, as Pools.

    fetch_read   codes, blocks, rows   what tokens read, as stored: on its way, in few registers
    decode_read  -> tile, scale        scaled(tile, scale) is what they read, summed(tile, scale, t) its product with t
    load_update  tile                  what a flush starts from
    store        tile ->               encode and write every plane
    store_block  part of a tile ->     the same by blocks of columns, once `widest` has seen them all; then store_scales

A scale multiplies the sum over what it serves, a row or a block, not every element. What decoding and encoding cost,
in machine instructions per element, is printed by `python tests/compile_kernels.py cost` (table in docs/formats.md).
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from replayssm import formats
from replayssm.arithmetic_kernel import NVIDIA

# Four bytes of two e2m1 codes each to the e4m3 codes of the first ones and of the second ones: the same numbers times
# 2^-6, signs at bit 7, the other three bits at 4..2. From there hardware converts two at a time.
E2M1_ASM = tl.constexpr("""{
    .reg .b32 s, m;
    shl.b32 s, $2, 4; shl.b32 m, $2, 2; and.b32 m, m, 0x1C1C1C1C; lop3.b32 $0, s, 0x80808080, m, 0xEA;
    shr.b32 m, $2, 2; and.b32 m, m, 0x1C1C1C1C; lop3.b32 $1, $2, 0x80808080, m, 0xEA;
}""")


def described(name: str) -> formats.Format:
    """The format of a name, for the functions below, which run when a kernel is compiled."""
    return formats.get(name)


described.__triton_builtin__ = True  # type: ignore[attr-defined]  # Triton need not read on from here


@triton.constexpr_function
def checkpoint_kind(FORMAT: Any) -> str:
    """The kind of the checkpoint, or "residual"."""
    fmt = described(FORMAT)
    return "residual" if fmt.residual else fmt.kind.name


@triton.constexpr_function
def copy_kind(FORMAT: Any) -> str | None:
    """The kind of the copy, or None."""
    fmt = described(FORMAT)
    return fmt.copy.name if fmt.copy else None


@triton.constexpr_function
def read_kind(FORMAT: Any) -> str:
    """The kind that tokens read."""
    return described(FORMAT).reads.name


@triton.constexpr_function
def read_parts(FORMAT: Any) -> int:
    """How many bf16 numbers add up to any element that tokens read, its row's scale apart."""
    return {"fp32": 3, "fp16": 2}.get(described(FORMAT).reads.name, 1)


@triton.constexpr_function
def update_parts(FORMAT: Any) -> int:
    """How many bf16 numbers add up to any element that a flush starts from."""
    fmt = described(FORMAT)
    return 3 if fmt.residual_bits else {"bf16": 1, "fp16": 2}.get(fmt.kind.name, 3)


@triton.constexpr_function
def in_bf16(FORMAT: Any) -> bool:
    """Whether tokens read bf16 numbers, as they are stored."""
    return described(FORMAT).reads.name in ("bf16", "split16")


@triton.constexpr_function
def copy_planes(FORMAT: Any) -> int:
    """How many planes the copy has: the checkpoint's own come behind them."""
    fmt = described(FORMAT)
    return len(fmt.copy.planes) if fmt.copy else 0


@triton.constexpr_function
def residual_bits(FORMAT: Any) -> int:
    """Bits of the residual."""
    return described(FORMAT).residual_bits


@triton.constexpr_function
def residual_unit(FORMAT: Any) -> float:
    """A residual's unit in half steps."""
    return described(FORMAT).residual_unit


@triton.constexpr_function
def is_stochastic(FORMAT: Any) -> bool:
    """Whether the checkpoint is rounded stochastically."""
    return described(FORMAT).stochastic


@triton.constexpr_function
def needs_whole_rows(FORMAT: Any) -> bool:
    """Whether a row of K can be encoded only when all of it was seen, since it has a scale."""
    fmt = described(FORMAT)
    return bool(fmt.reads.parts or fmt.kind.parts)


@triton.constexpr_function
def overwrites_scales(FORMAT: Any) -> bool:
    """Whether a flush loads scales of blocks, which several threads do at once, and writes them anew."""
    fmt = described(FORMAT)
    kind = fmt.copy if fmt.copy and fmt.residual else fmt.kind
    return kind.block > 1


@triton.constexpr_function
def stores_floats(FORMAT: Any) -> bool:
    """Whether `store` returns what tokens will read: numbers without a scale, of which there is no other copy."""
    return described(FORMAT).copy is None and not needs_whole_rows(FORMAT)


@triton.constexpr_function
def reads_the_update(FORMAT: Any) -> bool:
    """Whether what tokens read is all that a flush needs: decode_read's tile, scaled, is load_update's."""
    fmt = described(FORMAT)
    return fmt.copy is None and fmt.kind.name != "split16"


# ---- planes ----


@triton.constexpr_function
def divides(n: Any, whole: Any) -> bool:
    """Whether tiles of n, at multiples of n and none behind `whole`, cover it exactly: then no mask is needed."""
    return int(getattr(whole, "value", whole)) % int(getattr(n, "value", n)) == 0


divides.__triton_builtin__ = True


@triton.jit
def load_part(p, mask):
    """A load whose mask may be None: all of it is there."""
    if mask is None:
        return tl.load(p)
    else:
        return tl.load(p, mask=mask, other=0.0)


@triton.jit
def rows(plane, slot, i_h, o_v, V: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the rows o_v of a head, which follow each other, begin in a plane: [BV]."""
    o_x = tl.arange(0, o_v.shape[0])  # one address, the others at distances that are known: a tenth fewer instructions
    return plane.data + slot * plane.slot + (i_h * V + (o_v - o_x)) * COLUMNS + o_x * COLUMNS


@triton.jit
def load_elements(
    plane, slot, i_h, o_v, V: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr, EVICT: tl.constexpr = False,
    first=0,
):  # fmt: skip
    """[BV, BC] entries as stored from column `first` on, 0 beyond."""
    o = tl.arange(0, BC)
    p = rows(plane, slot, i_h, o_v, V, COLUMNS)[:, None] + first + o
    policy: tl.constexpr = "evict_first" if EVICT else ""
    if divides(o_v.shape[0], V) and divides(BC, COLUMNS):
        return tl.load(p, eviction_policy=policy)
    else:
        return tl.load(p, mask=(o_v < V)[:, None] & (first + o < COLUMNS), other=0, eviction_policy=policy)


@triton.jit
def store_elements(plane, slot, i_h, o_v, x, V: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr, first=0):
    o = tl.arange(0, BC)
    p = rows(plane, slot, i_h, o_v, V, COLUMNS)[:, None] + first + o
    if divides(o_v.shape[0], V) and divides(BC, COLUMNS):
        tl.store(p, x)
    else:
        tl.store(p, x, mask=(o_v < V)[:, None] & (first + o < COLUMNS))


@triton.jit
def load_rows(plane, slot, i_h, o_v, V: tl.constexpr):
    """[BV], one entry for every row."""
    return tl.load(rows(plane, slot, i_h, o_v, V, 1), mask=o_v < V, other=0.0)


@triton.jit
def store_rows(plane, slot, i_h, o_v, x, V: tl.constexpr):
    tl.store(rows(plane, slot, i_h, o_v, V, 1), x, mask=o_v < V)


# ---- decoding ----


@triton.jit
def e4m3(codes):
    """uint8 codes as fp32. There are no NaN among ours."""
    if NVIDIA:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = codes.to(tl.uint32)
    return (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def e2m1(codes, BV: tl.constexpr, BK: tl.constexpr):
    """Bytes of two codes, [BV, BK / 2], as fp32 times 2^-6: [BV, BK]."""
    if NVIDIA:
        first, second = tl.inline_asm_elementwise(
            E2M1_ASM, "=r,=r,r", [codes], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        first, second = ((codes & 7) << 2) | ((codes & 8) << 4), ((codes >> 2) & 0x1C) | (codes & 0x80)
    return tl.reshape(tl.join(e4m3(first), e4m3(second)), [BV, BK])


@triton.jit
def block_scale(blocks, rows, KIND: tl.constexpr, POWER: tl.constexpr):
    """Scales of a 4-bit kind's blocks, rows' scales in them, times 2^POWER: [BV, BK / block] fp32."""
    if KIND == "fp4":
        # e4m3 without subnormal numbers: its bits in fp32's place times 2^120
        return ((blocks.to(tl.uint32) << 20) + ((120 + POWER) << 23)).to(tl.float32, bitcast=True) * rows[:, None]
    else:
        scale = ((blocks.to(tl.uint32) + POWER) << 23).to(tl.float32, bitcast=True)
        return tl.where(blocks == 255, float("nan"), scale)


@triton.jit
def in_blocks(tile, scale):
    """[BV, BK] as [BV, blocks, BK / blocks]."""
    return tl.reshape(tile, [tile.shape[0], scale.shape[1], tile.shape[1] // scale.shape[1]])


@triton.jit
def scaled(tile, scale, KIND: tl.constexpr):
    """A tile [BV, BK] times the scale of its kind: of blocks [BV, blocks], of rows [BV], or none."""
    if KIND == "fp4" or KIND == "mxfp4":
        return tl.reshape(in_blocks(tile, scale) * scale[:, :, None], [tile.shape[0], tile.shape[1]])
    elif KIND == "fp8" or KIND == "int8":
        return tile * scale[:, None]
    else:
        return tile


@triton.jit
def summed(tile, scale, t, KIND: tl.constexpr):
    """scaled(tile, scale) t for t [BK]: [BV]. The scale multiplies sums."""
    if KIND == "fp4" or KIND == "mxfp4":
        return tl.sum(tl.sum(in_blocks(tile * t, scale), 2) * scale, 1)
    elif KIND == "fp8" or KIND == "int8":
        return tl.sum(tile * t, 1) * scale
    else:
        return tl.sum(tile * t, 1)


@triton.jit
def fetch_kind(
    planes, slot, i_h, o_v, V: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    FIRST: tl.constexpr, EVICT: tl.constexpr = False, from_k=0,
):  # fmt: skip
    """Codes, scales of blocks, scales of rows (1 where there are none) of a kind, as stored; planes from FIRST on."""
    if KIND == "fp8" or KIND == "int8":
        codes = load_elements(planes[FIRST], slot, i_h, o_v, V, K, BK, EVICT, from_k)
        return codes, 1.0, load_rows(planes[FIRST + 1], slot, i_h, o_v, V)
    elif KIND == "fp4":
        codes = load_elements(planes[FIRST], slot, i_h, o_v, V, K // 2, BK // 2, EVICT, from_k // 2)
        blocks = load_elements(planes[FIRST + 1], slot, i_h, o_v, V, K // 16, BK // 16, False, from_k // 16)
        return codes, blocks, load_rows(planes[FIRST + 2], slot, i_h, o_v, V)
    elif KIND == "mxfp4":
        codes = load_elements(planes[FIRST], slot, i_h, o_v, V, K // 2, BK // 2, EVICT, from_k // 2)
        blocks = load_elements(planes[FIRST + 1], slot, i_h, o_v, V, K // 32, BK // 32, False, from_k // 32)
        return codes, blocks, 1.0
    else:
        return load_elements(planes[FIRST], slot, i_h, o_v, V, K, BK, EVICT, from_k), 1.0, 1.0


@triton.jit
def decode_kind(codes, blocks, rows, BV: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    """Tile [BV, BK] fp32 and scale of what fetch_kind loaded."""
    if KIND == "fp8":
        return e4m3(codes), rows
    elif KIND == "int8":
        # 2^23 + code, by its bits
        return (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0, rows
    elif KIND == "fp4" or KIND == "mxfp4":
        return e2m1(codes, BV, BK), block_scale(blocks, rows, KIND, 6)
    else:
        return codes.to(tl.float32), rows


@triton.jit
def fetch_read(
    planes, slot, i_h, o_v, V: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, from_k=0
):  # fmt: skip
    """Rows o_v of a head that tokens read, as stored: codes, scales of blocks, scales of rows; 1 where there are none.

    | Name   | Shape       | Dtype     | Dir | Meaning                                          |
    | planes | tuple       | by format | in  | Pools of all planes, in the format's order       |
    | slot   | one         | int64     | in  |                                                  |
    | o_v    | [BV]        | int32     | in  | rows of V, those from V on are 0                 |
    """
    return fetch_kind(planes, slot, i_h, o_v, V, K, BK, read_kind(FORMAT), 0, True, from_k)


@triton.jit
def decode_read(codes, blocks, rows, BV: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr):
    """What fetch_read loaded as tile [BV, BK] fp32 and scale, which `scaled` and `summed` take."""
    return decode_kind(codes, blocks, rows, BV, BK, read_kind(FORMAT))


@triton.jit
def half_step(code, KIND: tl.constexpr):
    """Half a step of a kind at a code."""
    if KIND == "fp8":
        power = (code.to(tl.int32, bitcast=True) >> 23) & 0xFF
        return ((tl.maximum(power, 121) - 4) << 23).to(tl.float32, bitcast=True)
    elif KIND == "int8":
        return tl.full(code.shape, 0.5, tl.float32)
    else:
        size = tl.abs(code)
        return tl.where(size >= 4.0, 1.0, tl.where(size >= 2.0, 0.5, 0.25))


@triton.jit
def nibbles(pairs, BV: tl.constexpr, BK: tl.constexpr):
    """Bytes [BV, BK / 2] as int32 0 to 15, [BV, BK]."""
    wide = pairs.to(tl.int32)
    return tl.reshape(tl.join(wide & 15, wide >> 4), [BV, BK])


@triton.jit
def load_residual(
    planes, slot, i_h, o_v, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr,
    BITS: tl.constexpr, from_k,
):  # fmt: skip
    """[BV, BK] in units, fp32."""
    if BITS == 4:
        low = load_elements(planes[FIRST], slot, i_h, o_v, V, K // 2, BK // 2, False, from_k // 2)
        return ((nibbles(low, BV, BK) ^ 8) - 8).to(tl.float32)
    r = load_elements(planes[FIRST], slot, i_h, o_v, V, K, BK, False, from_k).to(tl.int32)
    if BITS == 12:
        low = load_elements(planes[FIRST + 1], slot, i_h, o_v, V, K // 2, BK // 2, False, from_k // 2)
        r = (r << 4) + nibbles(low, BV, BK)
    return r.to(tl.float32)


@triton.jit
def product(x, y):
    """x y, rounded: never part of a fused multiply-add, which would round once less than torch does."""
    if NVIDIA:
        return libdevice.mul_rn(x, y)
    return x * y


@triton.jit
def load_update(
    planes, slot, i_h, o_v, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    from_k=0,
):  # fmt: skip
    """Rows o_v of a head as a flush starts from them, from column from_k on: [BV, BK] fp32. Arguments as fetch_read."""
    KIND: tl.constexpr = checkpoint_kind(FORMAT)
    FIRST: tl.constexpr = copy_planes(FORMAT)
    if KIND == "split16":
        high = load_elements(planes[FIRST], slot, i_h, o_v, V, K, BK, False, from_k)
        low = load_elements(planes[FIRST + 1], slot, i_h, o_v, V, K, BK, False, from_k).to(tl.int32)
        return ((high.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    elif KIND == "residual":
        COPY: tl.constexpr = copy_kind(FORMAT)
        BITS: tl.constexpr = residual_bits(FORMAT)
        UNIT: tl.constexpr = residual_unit(FORMAT)
        r = load_residual(planes, slot, i_h, o_v, V, K, BV, BK, FIRST, BITS, from_k)
        codes, blocks, rows = fetch_kind(planes, slot, i_h, o_v, V, K, BK, COPY, 0, False, from_k)
        if COPY == "fp8" or COPY == "int8":
            code, scale = decode_kind(codes, blocks, rows, BV, BK, COPY)
        else:
            code, scale = e2m1(codes, BV, BK) * 64.0, block_scale(blocks, rows, COPY, 0)
        return scaled(code + r * (half_step(code, COPY) * UNIT), scale, COPY)
    else:
        codes, blocks, rows = fetch_kind(planes, slot, i_h, o_v, V, K, BK, KIND, FIRST, False, from_k)
        tile, scale = decode_kind(codes, blocks, rows, BV, BK, KIND)
        return scaled(tile, scale, KIND)


# ---- random bits and rounding ----


@triton.jit
def mix(x):
    """As formats._mix, on uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def noise_words(key, slot, flush):
    """The two words that a flush's noise of a slot begins from, as formats.noise_keys: once for all of its tiles."""
    s, f = slot.to(tl.uint32), (0 * slot + flush).to(tl.uint32)  # flush may be a literal
    return mix(mix(tl.load(key).to(tl.uint32) + s) + f), mix(mix(tl.load(key + 1).to(tl.uint32) + s) + f)


@triton.jit
def noise(words, i_h, o_v, from_k, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """16 random bits for every element of a tile, int32, as formats.noise."""
    low, high = words
    x = (i_h * V + o_v[:, None]) * ((K + 1) // 2) + (from_k // 2 + tl.arange(0, BK // 2))
    x = x.to(tl.uint32) ^ low
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = ((x ^ (x >> 15)) + high) * 0x735A2D97
    x = x ^ (x >> 15)
    return tl.reshape(tl.join((x & 0xFFFF).to(tl.int32), (x >> 16).to(tl.int32)), [BV, BK])


@triton.jit
def round_integer(x, random, STOCHASTIC: tl.constexpr):
    """x, |x| < 2^14, to whole numbers, int32."""
    if STOCHASTIC:
        return (tl.floor(x * 65536.0).to(tl.int32) + random) >> 16
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: the sum's own rounding, to nearest even


@triton.jit
def raised(x, random, CUT: tl.constexpr, LEAST: tl.constexpr):
    """Bits of |x| + base, plus noise below bit CUT, and base: 2^LEAST where |x| is below it, since numbers there are as
    dense as just above it. What is left above CUT is |x| + base rounded stochastically.
    """
    size, base = tl.abs(x), 0.0
    if LEAST > -126:
        FLOOR: tl.constexpr = 2.0**LEAST
        base = tl.where(size < FLOOR, FLOOR, 0.0)
        size += base
    if CUT > 16:
        up = random << (CUT - 16)
    else:
        up = random >> (16 - CUT)
    return size.to(tl.int32, bitcast=True) + up, base


@triton.jit
def round_float(x, random, MANTISSA: tl.constexpr, LEAST: tl.constexpr, STOCHASTIC: tl.constexpr):
    """x, which is a finite number in range, to a float of MANTISSA bits and least exponent LEAST."""
    CUT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        rounded, base = raised(x, random, CUT, LEAST)
        rounded = ((rounded >> CUT) << CUT).to(tl.float32, bitcast=True) - base
    else:
        size = bits & 0x7FFFFFFF
        up = ((1 << (CUT - 1)) - 1) + ((size >> CUT) & 1)
        rounded = (((size + up) >> CUT) << CUT).to(tl.float32, bitcast=True)
        if LEAST > -126:
            ALIGN: tl.constexpr = 2.0 ** (23 + LEAST - MANTISSA)
            small = (tl.minimum(tl.abs(x), 2.0**LEAST) + ALIGN) - ALIGN
            rounded = tl.where(size < ((LEAST + 127) << 23), small, rounded)
    return (rounded.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def power(most, LIMIT_BITS: tl.constexpr):
    """As formats._power, both given by their bits."""
    carry: tl.constexpr = 0x7FFFFF - (LIMIT_BITS & 0x7FFFFF)
    whole: tl.constexpr = LIMIT_BITS >> 23
    found = ((most + carry) >> 23) - whole + 127
    return tl.minimum(tl.maximum(found, 64), 190)


@triton.jit
def two_to(exponent):
    """2^e of e + 127."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


# ---- encoding ----


@triton.jit
def to_e4m3(value):
    """uint8 codes of numbers that e4m3 holds (NVIDIA: of any, to nearest, those beyond 448 as 448)."""
    if NVIDIA:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    small = (tl.abs(value) * 512.0).to(tl.int32)
    return (tl.where(size < (121 << 23), small, (size >> 20) - 960) | tl.where(bits < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def store_nibbles(
    plane, slot, i_h, o_v, x, from_k, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """int32 0 to 15, [BV, BK], two a byte."""
    low, high = tl.split(tl.reshape(x, [BV, BK // 2, 2]))
    store_elements(plane, slot, i_h, o_v, (low | (high << 4)).to(tl.uint8), V, K // 2, BK // 2, from_k // 2)


@triton.jit
def store_e2m1(
    plane, slot, i_h, o_v, x, random, from_k, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Numbers as e2m1, those beyond 6 as 6; returns what was stored, fp32 (to nearest only)."""
    if STOCHASTIC:
        bits, base = raised(x, random, 22, 0)
        value = x
    else:
        value = round_float(clamp(x, 6.0), 0, 1, 0, False)
        base = tl.where(tl.abs(value) < 1.0, 1.0, 0.0)
        bits = (tl.abs(value) + base).to(tl.int32, bitcast=True)
    # two bits of the exponent and one of the mantissa, from 1.0 (or what was raised to it) on
    code = tl.minimum((bits >> 22) - tl.where(base > 0.0, 254, 252), 7)
    sign = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32) & 8
    store_nibbles(plane, slot, i_h, o_v, code | sign, from_k, V, K, BV, BK)
    return value


@triton.jit
def widest(most, b_s, from_k, K: tl.constexpr):
    """Bits of the largest size in rows so far, int32 (from zeros [BV] on), with columns from from_k on: b_s [BV, BK].

    No finite number has as many as 0x7F800000.
    """
    size = b_s.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if divides(b_s.shape[1], K):
        return tl.maximum(most, tl.max(size, 1))
    return tl.maximum(most, tl.max(tl.where(from_k + tl.arange(0, b_s.shape[1]) < K, size, 0), 1))


@triton.jit
def of_rows(most):
    """Of rows whose `widest` is known: whether all is finite, and the bits of the largest size, 0 if not."""
    good = most < 0x7F800000
    return good, tl.where(good, most, 0)


@triton.jit
def store_scaled(
    planes, slot, i_h, o_v, b_s, most, random, from_k, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store columns of a scaled kind, whose rows are as `widest` says; scales of rows are stored by store_scales.

    Returns the codes (those to nearest), and state over scale before rounding. Rows that are not finite are zeros.
    """
    good, most = of_rows(most)
    b_s = tl.where(good[:, None], b_s, 0.0)
    if KIND == "fp8":
        ratio = b_s * two_to(254 - power(most, 0x43E00000))[:, None]  # 448
        rounded = round_float(ratio, random, 3, -6, STOCHASTIC)
        code = clamp(rounded, 448.0)
        # Hardware saturates, and rounds to nearest. Its codes are for nothing but a store: ptxas 12.8 packs them by
        # fours, and what else takes a pair of them reads a register that nobody wrote.
        stored = to_e4m3((rounded if STOCHASTIC else ratio) if NVIDIA else code)
        store_elements(planes[FIRST], slot, i_h, o_v, stored, V, K, BK, from_k)
    elif KIND == "int8":
        inverse = tl.div_rn(tl.full([BV], 1.0, tl.float32), int8_scale(most))
        ratio = product(b_s, tl.broadcast_to(inverse[:, None], [BV, BK]))
        whole = tl.minimum(tl.maximum(round_integer(ratio, random, STOCHASTIC), -127), 127)
        code = whole.to(tl.float32)
        store_elements(planes[FIRST], slot, i_h, o_v, (whole + 128).to(tl.uint8), V, K, BK, from_k)
    elif KIND == "fp4":
        exponent = power(most, 0x45280000)  # 6 * 448
        blocks = tl.reshape(b_s * two_to(254 - exponent)[:, None], [BV, BK // 16, 16])
        high = tl.minimum(tl.maximum(tl.max(tl.abs(blocks), 2) * 0.16666667163372040, 0.015625), 448.0)
        scale = round_float(high, 0, 3, -6, False)
        inverse = tl.div_rn(tl.full([BV, BK // 16], 1.0, tl.float32), scale)
        ratio = tl.reshape(product(blocks, tl.broadcast_to(inverse[:, :, None], [BV, BK // 16, 16])), [BV, BK])
        code = store_e2m1(planes[FIRST], slot, i_h, o_v, ratio, random, from_k, V, K, BV, BK, STOCHASTIC)
        stored = (scale.to(tl.int32, bitcast=True) >> 20) - 960
        store_elements(planes[FIRST + 1], slot, i_h, o_v, stored.to(tl.uint8), V, K // 16, BK // 16, from_k // 16)
    else:
        blocks = tl.reshape(b_s, [BV, BK // 32, 32])
        exponent = power(tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2), 0x40C00000)  # 6
        ratio = tl.reshape(blocks * two_to(254 - exponent)[:, :, None], [BV, BK])
        code = store_e2m1(planes[FIRST], slot, i_h, o_v, ratio, random, from_k, V, K, BV, BK, STOCHASTIC)
        stored = tl.where(good[:, None], exponent, 255)
        store_elements(planes[FIRST + 1], slot, i_h, o_v, stored.to(tl.uint8), V, K // 32, BK // 32, from_k // 32)
    return code, ratio


@triton.jit
def int8_scale(most):
    """Scale of rows whose largest size has the bits `most`."""
    most = most.to(tl.float32, bitcast=True)
    return tl.maximum(tl.div_rn(most, tl.full(most.shape, 127.0, tl.float32)), 1.1754943508222875e-38)


@triton.jit
def store_row_scales(planes, slot, i_h, o_v, most, V: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr):
    """The scale of every row of a kind, if it has one: NaN if the row is not finite."""
    good, most = of_rows(most)
    if KIND == "fp8":
        store_rows(planes[FIRST + 1], slot, i_h, o_v, tl.where(good, two_to(power(most, 0x43E00000)), float("nan")), V)
    elif KIND == "int8":
        store_rows(planes[FIRST + 1], slot, i_h, o_v, tl.where(good, int8_scale(most), float("nan")), V)
    elif KIND == "fp4":
        store_rows(planes[FIRST + 2], slot, i_h, o_v, tl.where(good, two_to(power(most, 0x45280000)), float("nan")), V)


@triton.jit
def store_scales(planes, slot, i_h, o_v, most, V: tl.constexpr, FORMAT: tl.constexpr):
    """Scales of rows, of all kinds that a format has: last, since every block of a row is decoded by its old one."""
    FIRST: tl.constexpr = copy_planes(FORMAT)
    if FIRST > 0:
        store_row_scales(planes, slot, i_h, o_v, most, V, copy_kind(FORMAT), 0)
    store_row_scales(planes, slot, i_h, o_v, most, V, checkpoint_kind(FORMAT), FIRST)


@triton.jit
def store_residual(
    planes, slot, i_h, o_v, code, ratio, random, from_k, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """What a copy lacks of the state, from its codes and the ratio of state and scale."""
    BITS: tl.constexpr = residual_bits(FORMAT)
    UNIT: tl.constexpr = residual_unit(FORMAT)
    FIRST: tl.constexpr = copy_planes(FORMAT)
    MOST: tl.constexpr = 2 ** (BITS - 1) - 1
    # half a step is a power of two
    inverse = (0x7F000000 - half_step(code, copy_kind(FORMAT)).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    units = clamp((ratio - code) * inverse * (1 / UNIT), MOST * 1.0)
    r = tl.minimum(tl.maximum(round_integer(units, random, is_stochastic(FORMAT)), -MOST), MOST)
    if BITS == 4:
        store_nibbles(planes[FIRST], slot, i_h, o_v, r & 15, from_k, V, K, BV, BK)
    elif BITS == 8:
        store_elements(planes[FIRST], slot, i_h, o_v, r.to(tl.int8), V, K, BK, from_k)
    else:
        store_elements(planes[FIRST], slot, i_h, o_v, (r >> 4).to(tl.int8), V, K, BK, from_k)
        store_nibbles(planes[FIRST + 1], slot, i_h, o_v, r & 15, from_k, V, K, BV, BK)


@triton.jit
def store_float(
    planes, slot, i_h, o_v, b_s, random, from_k, V: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr, FIRST: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store a kind without a scale, from column from_k on; returns what tokens read, as fetch_read has it."""
    if KIND == "split16":
        bits = tl.where(b_s == b_s, b_s.to(tl.int32, bitcast=True), 0x7FC00000)
        upper = (bits + 0x8000) >> 16
        high = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
        store_elements(planes[FIRST], slot, i_h, o_v, high, V, K, BK, from_k)
        store_elements(planes[FIRST + 1], slot, i_h, o_v, (bits - (upper << 16)).to(tl.int16), V, K, BK, from_k)
        return high
    elif KIND == "fp16":
        kept = tl.where(b_s == b_s, clamp(b_s, 65504.0), b_s)
        if STOCHASTIC:
            kept = tl.where(b_s == b_s, round_float(kept, random, 10, -14, True), b_s)
        half = kept.to(tl.float16)
        store_elements(planes[FIRST], slot, i_h, o_v, half, V, K, BK, from_k)
        return half
    elif KIND == "bf16":
        kept = tl.where(b_s == b_s, clamp(b_s, 3.3895313892515355e38), b_s)
        # by hand: the interpreter's conversion truncates
        bits = round_float(kept, random, 7, -126, STOCHASTIC).to(tl.int32, bitcast=True)
        high = tl.where(b_s == b_s, bits >> 16, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        store_elements(planes[FIRST], slot, i_h, o_v, high, V, K, BK, from_k)
        return high
    else:
        store_elements(planes[FIRST], slot, i_h, o_v, b_s, V, K, BK, from_k)
        return b_s


@triton.jit
def store_kind(
    planes, slot, i_h, o_v, b_s, most, random, from_k, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store one kind, planes from FIRST on; returns what tokens read, as fetch_read has it, or (with scales) b_s."""
    if KIND == "fp8" or KIND == "int8" or KIND == "fp4" or KIND == "mxfp4":
        store_scaled(planes, slot, i_h, o_v, b_s, most, random, from_k, V, K, BV, BK, KIND, FIRST, STOCHASTIC)
        return b_s
    else:
        return store_float(planes, slot, i_h, o_v, b_s, random, from_k, V, K, BK, KIND, FIRST, STOCHASTIC)


@triton.jit
def store_block(
    planes, slot, i_h, o_v, b_s, most, words, from_k, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Encode and store b_s [BV, BK], columns from from_k on of rows o_v of a head, in all planes but those of rows.

    Returns what tokens read if stores_floats. Behind a row's last block store_scales is to be called.

    | Name       | Shape | Dtype | Dir | Meaning                                                   |
    | planes     | tuple |       | out | as in fetch_read                                          |
    | b_s        | tile  | fp32  | in  |                                                           |
    | most       | [BV]  | int32 | in  | `widest` of the whole rows; nothing where none has a scale|
    | words      | tuple |       | in  | noise_words of the slot that noise is drawn for           |
    """
    STOCHASTIC: tl.constexpr = is_stochastic(FORMAT)
    KIND: tl.constexpr = checkpoint_kind(FORMAT)
    COPY: tl.constexpr = copy_kind(FORMAT)
    FIRST: tl.constexpr = copy_planes(FORMAT)
    random = 0
    if KIND == "residual":
        code, ratio = store_scaled(
            planes, slot, i_h, o_v, b_s, most, 0, from_k, V, K, BV, BK, COPY, 0, False
        )  # fmt: skip
        if STOCHASTIC:
            random = noise(words, i_h, o_v, from_k, V, K, BV, BK)
        store_residual(planes, slot, i_h, o_v, code, ratio, random, from_k, V, K, BV, BK, FORMAT)
        return b_s
    else:
        if COPY is not None:
            store_kind(planes, slot, i_h, o_v, b_s, most, 0, from_k, V, K, BV, BK, COPY, 0, False)
        if STOCHASTIC:
            random = noise(words, i_h, o_v, from_k, V, K, BV, BK)
        return store_kind(
            planes, slot, i_h, o_v, b_s, most, random, from_k, V, K, BV, BK, KIND, FIRST, STOCHASTIC
        )  # fmt: skip


@triton.jit
def store(
    planes, slot, i_h, o_v, b_s, words, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """store_block and store_scales of whole rows."""
    most = 0
    if needs_whole_rows(FORMAT):
        most = widest(tl.zeros([BV], tl.int32), b_s, 0, K)
    b_s = store_block(planes, slot, i_h, o_v, b_s, most, words, 0, V, K, BV, BK, FORMAT)
    if needs_whole_rows(FORMAT):
        store_scales(planes, slot, i_h, o_v, most, V, FORMAT)
    return b_s

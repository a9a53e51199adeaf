"""Storage formats of the checkpoint: how a state is kept, and which part of it a token reads.

A format is planes. `encode` turns a state into planes (at a flush), `update` turns planes back into the state that the
next flush starts from, `read` turns the first of them into what tokens are answered from. Reading never touches the
update value, so a coarse `read` costs output accuracy only and the state stays as good as `update(encode(state))`.

    format := kind [ "/nearest" | "/stochastic" ] [ "+" copy [ "/residual" ] ]

    kind      bits  per row of K     value
    fp64      64                     the yardstick of the tests
    fp32      32                     exact
    split16   32                     fp32, exactly: bf16 high plane + int16 low plane; tokens read the high plane
    bf16      16                     saturating at the largest finite value, as fp16
    fp16      16
    fp8       8     1 fp32           e4m3 times a power of two, the smallest with which nothing saturates
    int8      8     1 fp32           -127 to 127 times amax / 127; stored as 1 to 255, which turns to a float faster
    fp4       4     1 fp32, K / 16   NVFP4: e2m1 times an e4m3 per 16 along K, times a power of two
    mxfp4     4     K / 32 bytes     MXFP4: e2m1 times a power of two per 32 along K

A kind alone is read and updated (the *shared* mode). `+ copy`: tokens read a copy in another kind, written at a flush
beside the checkpoint, rounded to nearest. `/residual`: the checkpoint is that copy plus what it lacks, in as many bits
as fp16 or fp8 has left over, so no second copy is stored: value = (code + r unit half_step) scale, with a whole number
r and half a step of the copy at that code. That is at least as fine as fp16 or fp8.

Rounding is stochastic below 16 bits and wherever there is a copy, unless /nearest is said; fp64, fp32 and split16 round
nothing. A stochastic rounding goes up with the probability of the part that is cut off, so its mean is the value. The
random bits are a function of (seed, layer, slot, flush number, element): see `noise`. All of it is arithmetic that
kernels repeat bit for bit (formats_kernel.py): integers, powers of two, rounded products and quotients.

Powers of two that scale go from 2^-63 to 2^63: what is larger saturates (from 1e20 on), as it does in fp16. A row of K
with a value that is not finite reads as NaN in the scaled kinds, all of it, and no other row does.

Planes: [..., V, K / per] each, or [..., V, 1] where one entry serves the row.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import checks

Planes = tuple[Tensor, ...]


class Plane(NamedTuple):
    """A stored tensor: its dtype, and how many elements of a row of K one entry serves (0: all of them)."""

    dtype: torch.dtype
    per: int = 1

    def columns(self, K: int) -> int:
        """Entries for a row of K."""
        return K // self.per if self.per else 1


class Kind(NamedTuple):
    """One way to keep numbers.

    Attributes:
        bits: of an element, scales apart.
        planes: what is stored; the first `read_planes` of them are what a token reads.
        encode: (state [..., K], random int32 [..., K] or None for rounding to nearest) -> planes.
        decode: planes -> state in the compute dtype.
        read: the first `read_planes` planes -> state in the compute dtype.
        block: K must be a multiple of it.
        parts: planes -> (code, half a step at that code, scale) with decode = code * scale, where a residual
            can follow.
    """

    name: str
    bits: int
    planes: tuple[Plane, ...]
    encode: Callable[[Tensor, Tensor | None], Planes]
    decode: Callable[[Planes], Tensor]
    read: Callable[[Planes], Tensor]
    block: int = 1
    parts: Callable[[Planes], tuple[Tensor, Tensor, Tensor]] | None = None
    read_planes: int = 1
    compute: torch.dtype = torch.float32


class Format(NamedTuple):
    """A storage format: the checkpoint's kind, a copy for reading or None, and whether the copy is part of it.

    Attributes:
        name: as the grammar writes it, without what is said by default.
        stochastic: the checkpoint is rounded stochastically; copies never are.
    """

    name: str
    kind: Kind
    stochastic: bool
    copy: Kind | None = None
    residual: bool = False

    @property
    def compute(self) -> torch.dtype:
        """dtype of all arithmetic on states, gates and carried queries."""
        return self.kind.compute

    @property
    def reads(self) -> Kind:
        """What tokens read."""
        return self.copy or self.kind

    @property
    def planes(self) -> tuple[Plane, ...]:
        """All that is stored; what tokens read comes first."""
        if self.copy is None:
            return self.kind.planes
        return self.copy.planes + (_residual_planes(self.residual_bits) if self.residual else self.kind.planes)

    @property
    def read_planes(self) -> int:
        """How many planes a token reads."""
        return self.kind.read_planes if self.copy is None else len(self.copy.planes)

    @property
    def exact(self) -> bool:
        """Whether a checkpoint is what it was given, however often it is stored (fp32, split16)."""
        return self.kind.bits >= 32

    @property
    def residual_bits(self) -> int:
        """Bits of a residual, 0 where there is none."""
        return self.kind.bits - self.reads.bits if self.residual else 0

    @property
    def residual_unit(self) -> float:
        """A residual's unit in half steps of the copy."""
        return RESIDUAL_UNIT[self.residual_bits]

    def stored_bytes(self, K: int) -> float:
        """Bytes kept per state element, scales included."""
        return _bytes(self.planes, K)

    def read_bytes(self, K: int) -> float:
        """Bytes read per state element and token."""
        return _bytes(self.planes[: self.read_planes], K)

    def update_bytes(self, K: int) -> float:
        """Bytes read per state element and flush."""
        return _bytes(self.kind.planes if self.reads_apart else self.planes, K)

    @property
    def reads_apart(self) -> bool:
        """Whether what tokens read is a copy that a flush has no use for."""
        return self.copy is not None and not self.residual

    def empty(self, *shape: int, K: int, device: torch.device | str = "cpu") -> Planes:
        """Planes for states [*shape, K], with whatever memory holds."""
        return tuple(torch.empty(*shape, p.columns(K), dtype=p.dtype, device=device) for p in self.planes)

    def encode(self, state: Tensor, keys: Tensor | None = None) -> Planes:
        """Planes of a state.

        Args:
            state: [n, ..., K] in the compute dtype.
            keys: [n, 2] from `noise_keys`; needed where the format is stochastic.
        """
        random = None
        if self.stochastic:
            if keys is None:
                raise ValueError(f"formats.encode: {self.name!r} rounds stochastically and needs keys (noise_keys).")
            random = noise(keys, state.shape[1:])
        if self.copy is None:
            return self.kind.encode(state, random)
        copy = self.copy.encode(state, None)
        if not self.residual:
            return copy + self.kind.encode(state, random)
        return copy + self._encode_residual(state, copy, random)

    def update(self, planes: Planes) -> Tensor:
        """The state that the next flush starts from."""
        if self.copy is None:
            return self.kind.decode(planes)
        split = len(self.copy.planes)
        if not self.residual:
            return self.kind.decode(planes[split:])
        code, half_step, scale = self.copy.parts(planes[:split])  # type: ignore[misc]
        r = _join_residual(planes[split:], self.residual_bits)
        return (code + r * (half_step * self.residual_unit)) * scale

    def read(self, planes: Planes) -> Tensor:
        """What tokens are answered from, of the first `read_planes` planes."""
        return self.reads.read(planes)

    def _encode_residual(self, state: Tensor, copy: Planes, random: Tensor | None) -> Planes:
        bits, most = self.residual_bits, 2 ** (self.residual_bits - 1) - 1
        code, half_step, scale = self.copy.parts(copy)  # type: ignore[misc, union-attr]
        units = (_finite(state)[0] * (1 / scale) - code) * (1 / half_step) * (1 / self.residual_unit)
        units = torch.where(units.isnan(), 0.0, units.clamp(-most, most))  # where a row is not finite its scale says so
        return _split_residual(round_integer(units, random).clamp(-most, most), bits)


def _bytes(planes: tuple[Plane, ...], K: int) -> float:
    return sum(p.dtype.itemsize * p.columns(K) for p in planes) / K


# ---- random bits ----

WORD = 0xFFFFFFFF


def _mix(x: Tensor | int) -> Tensor | int:
    """A bijection of 32-bit words that flips every output bit with probability 1/2 (lowbias32), on int64."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def layer_key(seed: int, layer: int) -> tuple[int, int]:
    """The two words of (seed, layer)."""
    return tuple(_mix(_mix((seed ^ start) & WORD) + layer & WORD) for start in (0, 0x9E3779B9))  # type: ignore[return-value]


def noise_keys(key: Tensor, slots: Tensor, flushes: Tensor) -> Tensor:
    """The two words of (seed, layer, slot, flush number).

    Args:
        key: int64 [2], `layer_key`.
        slots, flushes: [n]

    Returns:
        int64 [n, 2], 32 bits each.
    """
    return _mix((_mix((key + slots[:, None]) & WORD) + flushes[:, None]) & WORD)  # type: ignore[return-value]


def noise(keys: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """16 random bits for every element: keys [n, 2] -> int32 [n, *shape].

    Two elements of a row share a word of 32 bits: word i is a hash of i (the rounds of `_mix`) that the keys enter
    before and between the rounds, ten integer instructions and no state, where one of Philox-4x32-10 takes about
    thirty. Kernels do the same.
    """
    *outer, size = shape
    words = (size + 1) // 2
    low, high = (_as_int32(keys[:, i, None]) for i in (0, 1))
    x = torch.arange(math.prod(outer) * words, dtype=torch.int32, device=keys.device)[None] ^ low
    x = (x ^ _shift(x, 16)) * 0x21F0AAAD
    x = ((x ^ _shift(x, 15)) + high) * 0x735A2D97
    x = x ^ _shift(x, 15)
    return torch.stack((x & 0xFFFF, _shift(x, 16)), -1).view(len(keys), *outer, 2 * words)[..., :size]


def _as_int32(word: Tensor) -> Tensor:
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _shift(x: Tensor, bits: int) -> Tensor:
    """A shift to the right without the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


# ---- rounding ----


def round_integer(x: Tensor, random: Tensor | None) -> Tensor:
    """x, |x| < 2^14, to whole numbers, int32: to the nearest (even), or up with the probability of its fraction."""
    if random is None:
        return x.round().to(torch.int32)
    return ((x * 65536).floor().to(torch.int32) + random) >> 16


def round_float(x: Tensor, mantissa: int, least: int, random: Tensor | None) -> Tensor:
    """x to a float of `mantissa` bits (at most 10 where there are subnormal ones) and least exponent `least`.

    To the nearest (even), or up with the probability of what is cut off, 16 bits of it. Exponents above are not
    bounded: x must be in range. Signs stay; a NaN stays one.
    """
    cut = 23 - mantissa
    bits = x.view(torch.int32)
    size = bits & 0x7FFFFFFF
    below = size < _bits(2.0**least) if least > -126 else torch.zeros_like(x, dtype=torch.bool)
    if random is None:
        up = ((1 << (cut - 1)) - 1) + ((size >> cut) & 1)
        rounded = (((size + up) >> cut) << cut).view(torch.float32)
        # below 2^least numbers are as dense as just above it
        align = 2.0 ** (23 + least - mantissa)
        rounded = torch.where(below, (size.view(torch.float32) + align) - align, rounded)
    else:
        base = torch.where(below, 2.0**least, 0.0)
        size = (size.view(torch.float32) + base).view(torch.int32)
        up = random << (cut - 16) if cut > 16 else random >> (16 - cut)
        rounded = (((size + up) >> cut) << cut).view(torch.float32) - base
    rounded = (rounded.view(torch.int32) | (bits & -0x80000000)).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)


def _bits(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


def _power(amax: Tensor, limit: float) -> Tensor:
    """e + 127, int32, of the smallest power of two 2^e, -63 <= e <= 63, with amax <= limit 2^e."""
    whole, fraction = _bits(limit) >> 23, _bits(limit) & 0x7FFFFF
    return (((amax.view(torch.int32) + (0x7FFFFF - fraction)) >> 23) - whole + 127).clamp(64, 190)


def _two_to(power: Tensor) -> Tensor:
    """2^e of e + 127."""
    return (power << 23).view(torch.float32)


def _finite(state: Tensor) -> tuple[Tensor, Tensor]:
    """The state with zeros for rows where something is not finite, and per row 0, or NaN for those."""
    finite = state.isfinite().all(-1, keepdim=True)
    return torch.where(finite, state, 0.0), torch.where(finite, 0.0, torch.nan)


# ---- floats without a scale ----


def _float(name: str, dtype: torch.dtype, compute: torch.dtype = torch.float32) -> Kind:
    """One plane that holds the state in `dtype`; values beyond its range saturate."""
    info = torch.finfo(dtype)

    def encode(state: Tensor, random: Tensor | None) -> Planes:
        if state.dtype == dtype:
            return (state,)
        state = state.clamp(-info.max, info.max)
        if random is not None:
            mantissa, least = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}[dtype]
            state = round_float(state, mantissa, least, random)
        return (state.to(dtype),)

    def value(planes: Planes) -> Tensor:
        return planes[0].to(compute)

    return Kind(name, 8 * dtype.itemsize, (Plane(dtype),), encode, value, value, compute=compute)


def _encode_split16(state: Tensor, random: Tensor | None) -> Planes:
    """fp32 bits = (high << 16) + low, high rounded to nearest (half away from zero) so that low fits in an int16.

    A NaN becomes the standard quiet one first: rounding its bits up could carry into the sign and hide it.
    """
    bits = torch.where(state.isnan(), 0x7FC00000, state.view(torch.int32))
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def _decode_split16(planes: Planes) -> Tensor:
    high, low = planes
    return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


# ---- scaled kinds: parts give (code, half a step, scale) ----


def _scaled(
    name: str,
    bits: int,
    planes: tuple[Plane, ...],
    encode: Callable[[Tensor, Tensor | None], Planes],
    parts: Callable[[Planes], tuple[Tensor, Tensor, Tensor]],
    block: int = 1,
) -> Kind:
    def decode(stored: Planes) -> Tensor:
        code, _, scale = parts(stored)
        return code * scale

    return Kind(name, bits, planes, encode, decode, decode, block, parts, len(planes))


def _encode_fp8(state: Tensor, random: Tensor | None) -> Planes:
    state, bad = _finite(state)
    power = _power(state.abs().amax(-1, keepdim=True), 448.0)
    code = round_float((state * _two_to(254 - power)).clamp(-448, 448), 3, -6, random)
    return code.to(torch.float8_e4m3fn).view(torch.uint8), _two_to(power) + bad


def _parts_fp8(planes: Planes) -> tuple[Tensor, Tensor, Tensor]:
    code = planes[0].view(torch.float8_e4m3fn).to(torch.float32)
    power = ((code.view(torch.int32) >> 23) & 0xFF).clamp(min=127 - 6)
    return code, _two_to(power - 4), planes[1]


def _encode_int8(state: Tensor, random: Tensor | None) -> Planes:
    state, bad = _finite(state)
    most = state.abs().amax(-1, keepdim=True)
    scale = (most / torch.full_like(most, 127)).clamp(min=2.0**-126)  # a GPU multiplies by 1 / 127 if that is a number
    return (round_integer(state * (1 / scale), random).clamp(-127, 127) + 128).to(torch.uint8), scale + bad


def _parts_int8(planes: Planes) -> tuple[Tensor, Tensor, Tensor]:
    return planes[0].to(torch.float32) - 128, torch.full_like(planes[1], 0.5), planes[1]


def _blocks(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size))


def _encode_e2m1(scaled: Tensor, random: Tensor | None) -> Tensor:
    """Numbers up to 6 in size as e2m1, two a byte, the first in the low half."""
    value = round_float(scaled, 1, 0, random)
    size = value.abs()
    code = torch.where(size < 1, (size * 2).to(torch.int32), (size.view(torch.int32) >> 22) - 252)
    return pack(code | torch.where(value.view(torch.int32) < 0, 8, 0))


def pack(nibbles: Tensor) -> Tensor:
    """int32 [..., K], 0 to 15 -> uint8 [..., K / 2]."""
    pairs = _blocks(nibbles, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """By byte: the two e2m1 values, and half a step at each: fp32 [256, 2] both."""
    size = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    half = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0])
    byte = torch.arange(256)
    both = torch.stack([byte & 15, byte >> 4], 1)
    return torch.cat([size, -size])[both].to(device), half[both & 7].to(device)


def _parts_e2m1(codes: Tensor, scale: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """As Kind.parts: scale [..., K / block]."""
    value, half = (table[codes.to(torch.int64)].flatten(-2) for table in _tables(codes.device))
    return value, half, scale.repeat_interleave(block, -1)


def _encode_fp4(state: Tensor, random: Tensor | None) -> Planes:
    state, bad = _finite(state)
    power = _power(state.abs().amax(-1, keepdim=True), 6 * 448.0)
    state = _blocks(state * _two_to(254 - power), 16)
    # no subnormal scales: blocks that small are nothing beside the row. To nearest: a largest element that is clipped
    # by 3 % costs less than a scale too large by 6 %
    scale = round_float((state.abs().amax(-1) * (1 / 6)).clamp(2.0**-6, 448), 3, -6, None)
    codes = _encode_e2m1((state * (1 / scale[..., None])).clamp(-6, 6).flatten(-2), random)
    return codes, scale.to(torch.float8_e4m3fn).view(torch.uint8), _two_to(power) + bad


def _parts_fp4(planes: Planes) -> tuple[Tensor, Tensor, Tensor]:
    return _parts_e2m1(planes[0], planes[1].view(torch.float8_e4m3fn).to(torch.float32) * planes[2], 16)


def _encode_mxfp4(state: Tensor, random: Tensor | None) -> Planes:
    state, bad = _finite(state)
    state = _blocks(state, 32)
    power = _power(state.abs().amax(-1), 6.0)
    codes = _encode_e2m1((state * _two_to(254 - power)[..., None]).clamp(-6, 6).flatten(-2), random)
    return codes, torch.where(bad.isnan(), 255, power).to(torch.uint8)


def _parts_mxfp4(planes: Planes) -> tuple[Tensor, Tensor, Tensor]:
    power = planes[1].to(torch.int32)
    return _parts_e2m1(planes[0], torch.where(power == 255, torch.nan, _two_to(power)), 32)


# ---- residuals ----


# By bits: a residual's unit in half steps of the copy. The largest residual then reaches half a step, as nearly as sums
# of code and residual stay exact in fp32.
RESIDUAL_UNIT = {4: 9 / 64, 8: 129 / 16384, 12: 1 / 2048}


def _residual_planes(bits: int) -> tuple[Plane, ...]:
    """A byte each where there are 8 bits or more, half a byte each where 4 remain."""
    return (Plane(torch.int8),) * (bits >= 8) + (Plane(torch.uint8, 2),) * (bits % 8 == 4)


def _split_residual(r: Tensor, bits: int) -> Planes:
    whole = (r >> (bits % 8)).to(torch.int8)
    return (whole,) * (bits >= 8) + ((pack(r & 15),) if bits % 8 == 4 else ())


def _join_residual(planes: Planes, bits: int) -> Tensor:
    """The residual [..., K] in fp32."""
    if bits == 8:
        return planes[0].to(torch.float32)
    low = torch.stack([planes[-1] & 15, planes[-1] >> 4], -1).flatten(-2).to(torch.int32)
    r = (planes[0].to(torch.int32) << 4) + low if bits > 8 else (low ^ 8) - 8
    return r.to(torch.float32)


# ---- the formats ----

KINDS: dict[str, Kind] = {
    "fp64": _float("fp64", torch.float64, torch.float64),
    "fp32": _float("fp32", torch.float32),
    "split16": Kind(
        "split16",
        32,
        (Plane(torch.bfloat16), Plane(torch.int16)),
        _encode_split16,
        _decode_split16,
        lambda planes: planes[0].to(torch.float32),
    ),
    "bf16": _float("bf16", torch.bfloat16),
    "fp16": _float("fp16", torch.float16),
    "fp8": _scaled("fp8", 8, (Plane(torch.uint8), Plane(torch.float32, 0)), _encode_fp8, _parts_fp8),
    "int8": _scaled("int8", 8, (Plane(torch.uint8), Plane(torch.float32, 0)), _encode_int8, _parts_int8),
    "fp4": _scaled(
        "fp4",
        4,
        (Plane(torch.uint8, 2), Plane(torch.uint8, 16), Plane(torch.float32, 0)),
        _encode_fp4,
        _parts_fp4,
        16,
    ),
    "mxfp4": _scaled("mxfp4", 4, (Plane(torch.uint8, 2), Plane(torch.uint8, 32)), _encode_mxfp4, _parts_mxfp4, 32),
}
_GRAMMAR = re.compile(r"(\w+)(?:/(nearest|stochastic))?(?:\+(\w+)(/residual)?)?")
FORM = (
    f"KIND[/nearest|/stochastic][+COPY[/residual]] with kinds {', '.join(KINDS)}, e.g. fp32, fp16+fp4, fp8+fp4/residual"
)


@cache
def get(name: str) -> Format:
    """The format called `name`.

    Raises:
        ValueError: the grammar has no such name, or it makes no sense.
    """
    match = _GRAMMAR.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"unknown format {name!r}: a format is {FORM}.")
    first, rounding, second, residual = match.groups()
    for part in (first, second):
        if part is not None and part not in KINDS:
            raise checks.unknown("format", part, KINDS)
    kind, copy = KINDS[first], KINDS[second] if second else None
    if copy and (copy.bits >= kind.bits or copy.bits > 16 or kind.compute != torch.float32):
        raise ValueError(
            f"format {name!r}: tokens read the copy, so it must be smaller than the checkpoint, in "
            f"{', '.join(k.name for k in KINDS.values() if k.bits <= 16)}, beside fp32 or less; got {kind.bits} bits "
            f"with a copy of {copy.bits}."
        )
    if residual and (first not in ("fp16", "fp8") or copy.parts is None):  # type: ignore[union-attr]
        raise ValueError(
            f"format {name!r}: with /residual the checkpoint's size is that of fp16 or fp8 and the copy is one of "
            f"{', '.join(k.name for k in KINDS.values() if k.parts)}; got {first} and {second}."
        )
    exact = kind.bits >= 32
    if rounding and exact:
        raise ValueError(f"format {name!r}: {first} rounds nothing, so it is neither nearest nor stochastic.")
    default = not exact and (kind.bits < 16 or copy is not None)
    stochastic = default if rounding is None else rounding == "stochastic"
    written = first + (f"/{rounding}" if rounding and stochastic != default else "")
    written += f"+{second}{residual or ''}" if second else ""
    return Format(written, kind, stochastic, copy, bool(residual))


def by_layer(format: str | Mapping[Any, str], layers: int) -> tuple[Format, tuple[Format, ...]]:
    """The default format, and that of every layer.

    Args:
        format: one name for all, or {"default": name, layer: name, ...} with layers counted from 0 among the recurrent
            ones, as numbers or (from JSON) as text.

    Raises:
        ValueError: an unknown name, a layer that is not there, or fp64 beside others.
    """
    if not isinstance(format, Mapping):
        return get(format), (get(format),) * layers
    names = {str(layer): name for layer, name in format.items()}
    if "default" not in names:
        raise ValueError(f"format by layer: give the other layers' format as 'default'; got {sorted(names)} alone.")
    default = get(names.pop("default"))
    wrong = sorted(names.keys() - {str(layer) for layer in range(layers)})
    if wrong:
        raise ValueError(f"format by layer: recurrent layers are counted from 0 to {layers - 1}; got {wrong}.")
    chosen = tuple(get(names[str(layer)]) if str(layer) in names else default for layer in range(layers))
    if len({fmt.compute for fmt in chosen}) > 1:
        raise ValueError("format by layer: fp64 is for all layers or none, since gates have one precision.")
    return default, chosen


def check_dims(where: str, fmt: Format, K: int) -> None:
    """Refuse a format that cannot hold rows of K.

    Raises:
        ValueError: K is no multiple of a block of the format.
    """
    for kind in (fmt.kind, fmt.copy):
        if kind is not None and K % kind.block:
            raise ValueError(
                f"{where}: format {fmt.name!r} keeps {kind.name} in blocks of {kind.block} along K; got K = {K}. "
                f"Take one without {kind.name}."
            )

"""Arithmetic that kernels share: gates, exact products on tensor cores."""

import os
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Instructions that only NVIDIA GPUs have, some from Ada on: e4m3 conversions, products that are not fused, byte
# shuffles, quotients that flush to zero. Elsewhere, and in the interpreter, plain arithmetic makes the same values.
NVIDIA = tl.constexpr(
    torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 9)
)
SIGMOID_ASM = tl.constexpr("""{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t;
}""")


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) to two ulp, by the same approximations as exp and a quotient; these also serve subnormal
    numbers, which are 0 or 1 here anyway, and take twice the instructions."""
    if NVIDIA:
        return tl.inline_asm_elementwise(SIGMOID_ASM, "=f,f", [x.to(tl.float32)], tl.float32, is_pure=True, pack=1)
    else:
        return 1 / (1 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), the identity above 20. log1p by its correction term, exact to an ulp where exp(x) is small."""
    u = tl.exp(tl.where(x > 20.0, 20.0, x))
    y = 1.0 + u
    return tl.where(x > 20.0, x, tl.where(y == 1.0, u, tl.log(y) * (u / (y - 1.0))))


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0, to an ulp or two also where x is tiny: many such factors in a row must not drift.

    Its series down to -1: a walk (kda's fold) runs it once a record in every thread, and with a logarithm and a
    quotient it was a third of that loop.
    """
    y = x * (1 / 3628800) + 1 / 362880
    y = y * x + 1 / 40320
    y = y * x + 1 / 5040
    y = y * x + 1 / 720
    y = y * x + 1 / 120
    y = y * x + 1 / 24
    y = y * x + 1 / 6
    y = y * x + 0.5
    return tl.where(x < -1.0, tl.exp(x) - 1.0, y * x * x + x)


@triton.constexpr_function
def parts_of(dtype: Any) -> int:
    """How many bf16 numbers add up to any number of a dtype."""
    return {"bf16": 1, "fp16": 2, "fp32": 3}[str(dtype)]


parts_of.__triton_builtin__ = True


@triton.jit
def upper(x):
    """The upper half of fp32 bits, a bf16 number, and what x has below it: cheaper than to round, and as exact."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), x - (bits & 0xFFFF0000).to(
        tl.float32, bitcast=True
    )


@triton.jit
def add_product(acc, a, b, A: tl.constexpr, B: tl.constexpr):
    """acc [M, N] + a [M, K] b [K, N] on tensor cores: a is cut into A bf16 parts that add up to it, b into B.

    Left out are products of parts below the coarser side's last bit: 3 and 3 parts are as good as fp32.
    """
    tl.static_assert(a.shape[1] >= 16, "tensor cores sum over 16 or more")
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    for i in tl.static_range(A):
        if i + 1 < A:
            a_part, a = upper(a.to(tl.float32))
        else:
            a_part = a.to(tl.bfloat16)
        left = b
        for j in tl.static_range(B):
            if i + j < max(A, B):
                if j + 1 < B:
                    b_part, left = upper(left.to(tl.float32))
                else:
                    b_part = left.to(tl.bfloat16)
                acc = tl.dot(a_part, b_part, acc)
    return acc


@triton.jit
def store_parts(p, x, mask, stride, P: tl.constexpr):
    """x as P bf16 parts that add up to it, `stride` elements apart."""
    for i in tl.static_range(P):
        if i + 1 < P:
            part, x = upper(x.to(tl.float32))
        else:
            part = x.to(tl.bfloat16)
        tl.store(p + i * stride, part, mask=mask)

"""Compile every kernel for a GPU that need not be here; report registers and spills: python compile_kernels.py 90.

`python compile_kernels.py 90 5 9` reports what differs where steps bring 5 or 9 tokens: prepare, read and the
one launch of small batches, of the first geometry of every recurrence.

`python compile_kernels.py cost` reports the machine instructions per element (sm_90) of every format's blocks.
"""

import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replayssm import (
    Geometry,
    arithmetic_kernel,
    flush_kernel,
    formats,
    formats_kernel,
    kernels,
    launch_choices,
    read_kernel,
    recurrences,
    ring_kernel,
    update_kernel,
)
from replayssm.device import Device
from replayssm.formats_kernel import decode_read, fetch_read, load_update, noise_words, read_kind, store, summed
from replayssm.step_kernel import Field, Inputs, LayerWeights, Pool, Ring

FORMATS = ("fp32", "split16", "bf16", "fp16")
SCALED = ("fp8", "fp16+fp4/residual")  # for the first geometry of every recurrence: they take long to compile
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
SHAPES = {
    "mamba2": [(64, 8, 64, 128), (96, 8, 80, 128), (128, 8, 64, 128)],
    "gdn": [(32, 16, 128, 128), (64, 16, 128, 128)],
    "kda": [(32, 32, 128, 128)],
}
WINDOW, WIDTH = 16, 4
ROWS = (1, 32, 256)  # 32, where carry and flush are one launch: one token, and the first geometry of every recurrence
EXTRA: dict[str, int] = {}
BF16, FP32 = Field("*bf16", "i32", "i32"), Field("*fp32", "i32", "i32")
RING = Ring(*(Pool(pointer, "i32") for pointer in ("*bf16", "*bf16", *4 * ("*fp32",), "*bf16")))


def resources(
    kernel: Any,
    types: dict[str, Any],
    constants: dict[str, Any],
    warps: int,
    target: GPUTarget,
    most: int | None = None,
) -> str:
    """Registers and spilled bytes of one kernel; None where its target has no such report. `most` of registers."""
    types = {name: x for name, x in types.items() if name in kernel.arg_names}
    constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
    known = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {}

    def described(x: Any, at: tuple[int, ...]) -> Any:
        """The type as a signature has it; pointers and strides beside them are multiples of 16, as in real launches."""
        if isinstance(x, tuple):
            parts = [described(part, (*at, i)) for i, part in enumerate(x)]
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        if x is None:
            known[at] = None
            return "constexpr"
        if x.startswith("*") or len(at) > 1:
            aligned[at] = [["tt.divisibility", 16]]
        return x

    signature = {
        name: "constexpr" if name in constants else described(types[name], (i,))
        for i, name in enumerate(kernel.arg_names)
    }
    source = ASTSource(kernel, signature, known, aligned)
    limit = {} if most is None or target.backend != "cuda" else {"maxnreg": most}
    made = triton.compile(source, target=target, options={"num_warps": warps, **limit, **EXTRA})
    if target.backend != "cuda":
        return "registers None spills None"
    use = cuobjdump(made, "--dump-resource-usage")
    registers, stack = (int(re.search(rf"{name}:(\d+)", use)[1]) for name in ("REG", "STACK"))
    return f"registers {registers} shared {made.metadata.shared} spills {spilled(made, target) if stack else 0}"


def spilled(made: Any, target: GPUTarget) -> int:
    """Bytes that the assembler spilled: a stack may serve divisions as well, so it is asked once more."""
    nvidia = triton.knobs.nvidia
    ptxas = (nvidia.ptxas_blackwell if target.arch >= 100 else nvidia.ptxas).path
    arch = re.search(r"\.target (sm_\w+)", made.asm["ptx"])[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [ptxas, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))


def cuobjdump(made: Any, option: str) -> str:
    """What cuobjdump says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def jobs(
    name: str, size: tuple[int, ...], tokens: int, amd: bool
) -> list[tuple[str, Any, dict[str, Any], dict[str, Any], int, int | None]]:
    """What, kernel, argument types, constants, warps and most registers of every kernel of one geometry."""
    recurrence, (H, G, V, K) = recurrences.get(name), size
    module, delta, R = recurrence.kernel(), recurrence.delta, WINDOW + tokens
    PDL = not amd
    sizes = {"H": H, "G": G, "N": H if delta else G, "V": V, "K": K, "R": R, "BK": launch_choices.columns(K), "P": 2}
    sizes |= {"CHANNEL": recurrence.channel_gate}
    carrying = sizes | {
        "T": tokens, "L": WIDTH - 1 + tokens, "W": WIDTH, **kernels.tiles(recurrence, WINDOW, tokens, torch.bfloat16),
        "CARRY": module.carry if tokens == 1 else module.carry_tokens, "GATES": module.gates,
    }  # fmt: skip
    ring = RING._replace(
        norm=RING.norm if delta else None, back=RING.back if Device().needs_back(recurrence, tokens) and delta else None
    )
    bound = None if delta else "fp32"
    inputs = {
        "inputs": Inputs(BF16, BF16, BF16, BF16 if delta else None, BF16),
        "weights": LayerWeights("*bf16", "i32", "i32", None, "*fp32", "*fp32", "fp32", bound, bound),
        "parent": None, "kin": None,
    }  # fmt: skip
    step = {
        "ring": ring, "table": "*i32", "ready": Pool("*i32", "i32"),
        "q": None if tokens == 1 else "*bf16", "t": "*bf16", "c": "*bf16" if tokens == 1 else "*fp32",
        "ends": "*fp32" if tokens == 1 else None, "part": "i32", "least": "i32",
    }  # fmt: skip
    outputs = {"y": "*bf16", "skip": None if delta else Field("*fp32", "i32", "i32"), "gate": None}
    found = []
    for fmt in FORMATS + (SCALED if size == SHAPES[name][0] else ()):
        pools = tuple(Pool(POINTERS[plane.dtype], "i32") for plane in formats.get(fmt).planes)
        planes = {"planes": pools, "key": "*i64"}
        folding = sizes | {"FORMAT": fmt, "DELTA": delta, "CHUNKS": 1, "CN": 16}
        for rows in ROWS if tokens == 1 and size == SHAPES[name][0] and fmt in FORMATS else (ROWS[0], ROWS[-1]):
            chosen = launch_choices.launch(recurrence, Geometry(*size), fmt, rows, tokens)
            folding |= {"AHEAD": chosen.fold_ahead}
            reading = carrying | {
                "BV": chosen.read_v,
                "BR": max(16, triton.next_power_of_2(WINDOW + tokens)),
            }  # fmt: skip
            answers = chosen.answers and formats_kernel.stores_floats(fmt)
            types = planes | step | outputs | {"answer": "*fp32" if answers else None}
            if tokens == 1 and not formats_kernel.in_bf16(fmt):
                types["t"] = "*fp32"
            if rows == ROWS[0] and tokens == 1 and formats.get(fmt).exact:
                constants = carrying | folding | kernels.first_channels(recurrence, Geometry(*size))
                constants |= {"BV": chosen.update_v, "PDL": PDL, "CARRY": module.carry_alone}
                found.append(
                    (f"update {fmt}", update_kernel.update_kernel, types | inputs, constants, chosen.update_warps, None)
                )
            if chosen.together:
                constants = carrying | reading | folding | {"BF": chosen.fold_v, "BB": chosen.fold_k, "PDL": PDL}
                found.append(
                    (f"decode {fmt}", kernels.decode_kernel, types | inputs, constants, chosen.read_warps, 255)
                )
            else:
                constants = reading | {
                    "BJ": chosen.carry_heads, "PDL": PDL, "BESIDE": True, "FORMAT": fmt, "BB": chosen.read_k,
                    "STAGES": chosen.read_stages, "RUN": chosen.read_run,
                }  # fmt: skip
                if rows == ROWS[-1]:
                    limits = chosen.read_warps, chosen.read_registers
                    found.append((f"read {fmt}", read_kernel.read_kernel, types, constants, *limits))
                constants = carrying | folding | {
                    "BF": chosen.fold_v, "BB": chosen.fold_k, "PDL": PDL,
                    "BJ": chosen.carry_heads,
                    "BC": triton.next_power_of_2(chosen.carry_heads * V),
                }  # fmt: skip
                scratch = "*fp32" if recurrence.channel_gate and chosen.fold_heads else None
                types |= inputs | {"B": "i32", "flushers": "i32", "scratch": scratch}
                roles: list[tuple[str, int, int | None]] = [("both", chosen.carry_warps, None)]
                if chosen.apart:
                    roles = [
                        ("carry", chosen.carry_warps, chosen.carry_registers),
                        ("flush", chosen.flush_warps, chosen.flush_registers),
                    ]
                for role, *limits in roles:
                    found.append((f"{role} {fmt}", kernels.prepare_kernel, types, constants | {"ROLE": role}, *limits))
        into = planes | {"into": pools, "ring": ring}
        into |= dict.fromkeys(("slots", "start", "counts", "flushes"), "*i64")
        folding |= {"BV": 16, "OUT": fmt, "IN_PLACE": True}
        warps = 8 if fmt in SCALED or recurrence.channel_gate else 4
        found.append((f"fold {fmt}", flush_kernel.fold_kernel, into, folding, warps, None))
    return found


@triton.jit
def read_block(planes, t, y, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, FORMAT: tl.constexpr):
    """S0 t for BV rows."""
    slot, o_v = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    codes, blocks, rows = fetch_read(planes, slot, 0, o_v, V, K, K, FORMAT)
    tile, scale = decode_read(codes, blocks, rows, BV, K, FORMAT)
    product = summed(tile, scale, tl.load(t + slot * K + tl.arange(0, K)), read_kind(FORMAT))
    tl.store(y + slot * V + o_v, product)


@triton.jit
def flush_block(planes, key, flushes, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, FORMAT: tl.constexpr):
    """A flush of nothing: BV rows decoded and encoded again."""
    slot, o_v = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    tile = load_update(planes, slot, 0, o_v, V, K, BV, K, FORMAT)
    store(planes, slot, 0, o_v, tile, noise_words(key, slot, tl.load(flushes + slot)), V, K, BV, K, FORMAT)


def instructions(kernel: Any, fmt: str, BV: int) -> int:
    """Machine instructions of a block's kernel for tiles [BV, 128], one warp, sm_90."""
    pools = tuple(Pool(POINTERS[plane.dtype], "i32") for plane in formats.get(fmt).planes)
    types = {"planes": pools, "t": "*fp32", "y": "*fp32", "key": "*i64", "flushes": "*i64"}
    constants = {"V": 64, "K": 128, "BV": BV, "FORMAT": fmt}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    known = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(0, i, j): [["tt.divisibility", 16]] for i in range(len(pools)) for j in (0, 1)}
    aligned |= {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in ("t", "y")}
    made = triton.compile(
        ASTSource(kernel, signature, known, aligned), target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}
    )
    listing = cuobjdump(made, "-sass")
    return len(re.findall(r"/\*[0-9a-f]{4,}\*/ +(?!NOP|@P0 NOP)", listing))


def costs() -> None:
    """Instructions per element and thread: what 8 more rows of a tile add. One is the product with the query."""
    arithmetic_kernel.NVIDIA = formats_kernel.NVIDIA = tl.constexpr(True)
    print("format                    read  flush")
    for fmt in ("fp32", "split16", "bf16", "fp16", "fp8", "int8", "fp4", "mxfp4", "fp16+fp4", "fp16+fp4/residual"):
        per = 8 * 128 / 32
        read, flush = (
            (instructions(kernel, fmt, 16) - instructions(kernel, fmt, 8)) / per for kernel in (read_block, flush_block)
        )
        print(f"{fmt:24s} {read:5.1f}  {flush:5.1f}", flush=True)


def main(arch: str) -> None:
    """One line per kernel, geometry and format."""
    amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch), 32)
    arithmetic_kernel.NVIDIA = formats_kernel.NVIDIA = tl.constexpr(not amd)
    cursors = {"cursors": "*i64", "table": "*i32", "S": "i32", "B": "i32", "BLOCK": ring_kernel.BLOCK}
    begin = {"given": "*i64", "lengths": "*i64", "T": 1, "R": WINDOW + 1, "MOST": 1, "WINDOW": WINDOW, "clock": "*i32"}
    begin |= {"accepted": "*i64", "CONV": WIDTH, "AT_ONCE": False}
    commit = {"counts": "*i64", "CONV": WIDTH}
    for what, kernel, own in (
        ("begin", ring_kernel.begin_kernel, begin),
        ("commit", ring_kernel.commit_kernel, commit),
    ):
        types = {name: x for name, x in (cursors | own).items() if isinstance(x, str)}
        constants = {name: x for name, x in (cursors | own).items() if not isinstance(x, str)}
        print(arch, "all", what, resources(kernel, types, constants, 4, target), flush=True)
    for name, sizes in SHAPES.items():
        for size in sizes[: 1 if amd else None]:  # registers are not reported there, and it takes minutes
            for what, kernel, types, constants, warps, most in jobs(name, size, 1, amd):
                print(arch, name, size, what, resources(kernel, types, constants, warps, target, most), flush=True)


def drafts(arch: str, tokens: int) -> None:
    """One line per kernel of several tokens."""
    arithmetic_kernel.NVIDIA = formats_kernel.NVIDIA = tl.constexpr(True)
    for name, sizes in SHAPES.items():
        for what, kernel, types, constants, warps, most in jobs(name, sizes[0], tokens, False):
            kind, fmt = what.split()
            if what == "decode fp32" or (kind in ("read", "carry", "flush") and fmt in ("fp32", "split16")):
                target = GPUTarget("cuda", int(arch), 32)
                print(arch, name, tokens, what, resources(kernel, types, constants, warps, target, most), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "cost":
        costs()
    elif len(sys.argv) > 2:
        for tokens in sys.argv[2:]:
            drafts(sys.argv[1], int(tokens))
    else:
        main(sys.argv[1])

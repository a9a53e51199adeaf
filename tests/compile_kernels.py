"""Compile every kernel for a GPU that need not be here; report registers and spills: python compile_kernels.py 90."""

import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replayssm import kernels, recurrences

PLANES = {
    "fp32": ("*fp32", "*fp32"),
    "split16": ("*bf16", "*i16"),
    "bf16": ("*bf16", "*bf16"),
    "fp16": ("*fp16", "*fp16"),
}
SHAPES = {
    "mamba2": [(64, 8, 64, 128), (96, 8, 80, 128)],
    "gdn": [(32, 16, 128, 128)],
    "kda": [(32, 32, 128, 128)],
}
TYPES = dict.fromkeys(("slots", "start", "committed", "counts"), "*i64")
TYPES |= {"sees": "*i1", "k": "*bf16", "v": "*bf16"}
TYPES |= {f"{name}_slot": "i64" for name in ("plane", "out", "k", "v", "g", "w", "norm", "back")}


def resources(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, target: GPUTarget) -> str:
    """Registers and spilled bytes of one kernel, from the assembler; None where its target has no such report."""
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    made = triton.compile(ASTSource(kernel, signature, constants, {}), target=target, options={"num_warps": warps})
    if target.backend != "cuda":
        return "registers None spills None"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        nvidia = triton.knobs.nvidia
        ptxas = (nvidia.ptxas_blackwell if target.arch >= 100 else nvidia.ptxas).path
        arch = re.search(r"\.target (sm_\w+)", made.asm["ptx"])[1]
        command = [ptxas, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)[1]
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return f"registers {registers} spills {spills}"


def main(arch: str) -> None:
    """One line per kernel, geometry and format."""
    amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch), 32)
    for name, sizes in SHAPES.items():
        module = recurrences.get(name).kernel()
        for H, G, V, K in sizes:
            base = {"H": H, "K": K, "R": 17, "BR": 16, "BK": 128}
            jobs: list[tuple[str, Any, dict[str, str], dict[str, Any], int]] = []
            gates = {"E": K if name == "kda" else 1, "TREE": False, "BJ": 8 if name == "mamba2" else 1}
            carry = base | gates | {"G": G, "T": 1, "BR": 16 if name == "mamba2" else 32}
            jobs.append(("carry", module.carry_kernel, TYPES, carry, 2 if name == "mamba2" else 1))
            for fmt, (high, low) in PLANES.items():
                types = TYPES | {"high": high, "low": low, "out_high": high, "out_low": low}
                tile = base | {"V": V}
                read = tile | {"T": 1, "BV": 64 if V <= 64 else 32}
                fold = tile | {"G": G, "FORMAT": fmt, "BV": 32, "OUT": "planes", "DOT": "ieee" if amd else "tf32x3"}
                jobs.append((f"read {fmt}", kernels.read_kernel, types, read, 4))
                jobs.append((f"fold {fmt}", module.fold_kernel, types, fold, 4))
            for what, kernel, types, constants, warps in jobs:
                print(arch, name, (H, G, V, K), what, resources(kernel, types, constants, warps, target))


if __name__ == "__main__":
    main(sys.argv[1])

"""Compile what a benchmark would compile on an H200, on a machine without a GPU, into Triton's cache:

    TRITON_CACHE_DIR=cache python benchmarks/precompile.py kernels --batch 256 --only-compile 0/1
    TRITON_CACHE_DIR=cache python benchmarks/precompile.py launches --case qwen3.5-4b --only-compile 0/1

There, `cache` is Triton's cache (~/.triton/cache); *.cubin and *.json are all it needs. Its keys hold Triton's and the
kernels' sources and Python's version (through Triton's library), not torch's: those must be the same on both machines.
"""

import functools
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ARCH, PROCESSORS = 90, 132


class Absent:
    """The driver of a GPU that is not here, as far as compiling asks for it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only() -> None:
    """Launches of kernels compile and do nothing else; caches of implementation `triton` may lie on the CPU."""
    driver.set_active(Absent())
    run = JITFunction.run
    JITFunction.run = lambda self, *args, warmup, **options: run(self, *args, warmup=True, **options)
    torch.cuda.get_device_capability = lambda device=None: divmod(ARCH, 10)
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.is_available, here = lambda: True, torch.cuda.is_available
    import replayssm.formats_kernel  # noqa: F401  # which instructions there are is asked when it is imported

    torch.cuda.is_available = here
    from replayssm import implementations, kernels
    from replayssm.bench import kernels as kernels_bench
    from replayssm.device import Device

    def device(name: str | None, device: torch.device, format: Any) -> Device:
        return Device()

    implementations.choose = device
    kernels.processors = lambda device: PROCESSORS
    kernels_bench._Ours = functools.partial(kernels_bench._Ours, device="cpu")


if __name__ == "__main__":
    compile_only()
    from replayssm.bench.__main__ import app

    app()

"""GPU: one recurrent layer's plain decode step, ours against the public kernels, whole intervals with their flushes.

How it is measured. A CUDA graph holds one step of a model of `layers` equal layers (begin, every layer, commit), so
that each layer finds the L2 cache cold, as in a model; it is replayed, and events stand between replays. A figure is
the mean of a whole window of steps over the layers, in which every row flushes once; a row of results holds the
median of such means with their 20 and 80 % percentiles. `staggered` rows flush in different steps, otherwise all in
one. The public kernels run in graphs over as many layers, with the same inputs. Both sides cover convolution, gates,
norms, state, skip.

A row is written only after the same case has passed its check: outputs and states of some rows, over more than a
window, against implementation `torch` with the same format, slots, seed and flush numbers, which encodes bit for bit
as the kernels do; and against the recurrence in fp64 (with the same bf16 activations), which says what the format
loses. Ceilings (a sum, a copy of 4 GiB) are measured first, in the same run. Bytes are counted from the cache's
records (ReplayCache.bytes_per_token) and what goes in and out.

The baseline is the fastest public kernel whose state has as many bits as the format's checkpoint, or more: fp32 for
32 bits, fp32 or bf16 for 16 bits and less (none keeps 8 or 4). `baselines_us` has all of them; `speedup_fp32` is
against the fastest that keeps fp32.
"""

import json
import math
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from replayssm import ConvGeometry, Geometry, ReplayCache, decode_layer, recurrences
from replayssm import formats as storage
from replayssm.bench import append_rows, baselines, replay
from replayssm.compare import provenance
from replayssm.testing import LayerInputs, cast, make_inputs, make_weights

WINDOW = 16
CASES = {
    "mamba2-h64": ("mamba2", Geometry(64, 8, 64, 128)),
    "nano-4b": ("mamba2", Geometry(96, 8, 80, 128)),
    "super": ("mamba2", Geometry(128, 8, 64, 128)),
    "qwen3.5-4b": ("gdn", Geometry(32, 16, 128, 128)),
    "qwen3.5-122b": ("gdn", Geometry(64, 16, 128, 128)),
    "kimi-linear": ("kda", Geometry(32, 32, 128, 128)),
}
# Relative errors that rounding explains. From fp64: outputs are in bf16; states are fp32's, whose inputs are in bf16.
ROUNDING = {"y": 4e-3, "state": 2e-4}
# From torch with the same format: rounding, and a share of what the format itself loses against fp64, since a sum's
# last bit sends a few elements to the other side of a step. Another rounding of every element would be a share of 1.4.
SHARE = 0.1


def main(
    case: Annotated[list[str], typer.Option(help=f"Of {', '.join(CASES)}.")] = list(CASES),  # noqa: B006
    batch: Annotated[str, typer.Option(help="Rows, several with commas.")] = "1,8,32,256",
    formats: Annotated[
        str, typer.Option("--format", help="Storage formats, several with commas.")
    ] = "fp32,split16,bf16",
    launches: Annotated[
        Path | None, typer.Option(help="Launch choices of the public kernels; searched if not given.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="The commit that runs, where there is no git.")] = None,
    seconds: Annotated[float, typer.Option(help="Start no further case after so long.")] = 3600.0,
    only_compile: Annotated[
        str | None, typer.Option(help="I/N: compile the kernels of every N-th case from the I-th, measure nothing.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Rows are appended here.")] = Path("results/kernels.jsonl"),
) -> None:
    """Plain decoding on a GPU against vLLM's and flash-linear-attention's kernels."""
    cells = [(name, int(rows), fmt) for name in case for rows in batch.split(",") for fmt in formats.split(",")]
    if only_compile:
        first, every = map(int, only_compile.split("/"))
        for cell in cells[first::every]:
            _Ours(*cell, layers=1, staggered=True).step()
        torch.cuda.synchronize()
        return
    console, started = Console(width=150), time.monotonic()
    known = json.loads(launches.read_text()) if launches else None
    origin = provenance() | {"gpu": torch.cuda.get_device_name()}
    if commit:
        origin |= {"commit": commit, "source_changed": None}
    origin["versions"] |= {"cuda": torch.version.cuda}
    ceiling = ceilings()
    console.print(f"{origin['gpu']}: reads {ceiling['read_gbps']:,.0f} GB/s, copies {ceiling['copy_gbps']:,.0f} GB/s")
    table = Table(
        "case", "B", "format", "staggered", "us", "slowest step", "baseline us", "speedup", "of ceiling", "baseline"
    )
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for name, rows, fmt in cells:
        if time.monotonic() - started > seconds:
            console.print("out of time: the rest was not measured")
            break
        others = []
        for state in stored_wider(fmt):
            key = (name, rows, state)
            if key not in found:
                found[key] = public(name, rows, state, known)
            others += found[key]
        for row in measure(name, rows, fmt, others, ceiling):
            append_rows(out, [row], origin)
            table.add_row(
                name, str(rows), fmt, str(row["staggered"]), f"{row['us']:.1f}", f"{row['step_us_slowest']:.1f}",
                f"{row['baseline_us']:.1f}", f"{row['speedup']:.2f}x", f"{row['share_of_read_ceiling']:.0%}",
                row["baseline"].split(" ")[0],
            )  # fmt: skip
    console.print(table)


class _Ours:
    """One step of a stack of replayed layers, and what it needs."""

    def __init__(
        self, case: str, rows: int, fmt: str, layers: int, staggered: bool, device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        name, self.geometry = CASES[case]
        self.recurrence = recurrences.get(name)
        generator = torch.Generator().manual_seed(0)
        self.cache = ReplayCache(
            name, self.geometry, layers=layers, slots=rows, window=WINDOW, format=fmt, dtype=dtype,
            conv=ConvGeometry(self.recurrence.conv_channels(self.geometry), 4), staggered=staggered, device=device,
            implementation="triton",
        )  # fmt: skip
        self.slots = self.cache.allocate(rows)
        self.cache.reset(self.slots)
        self.weights = layer_weights(self.cache, generator)
        x, raw_g, raw_w = make_inputs(self.cache, rows, 1, generator)
        self.inputs = LayerInputs(x.to(device), None if raw_g is None else raw_g.to(device), raw_w.to(device))

    def step(self) -> Tensor:
        """begin, every layer, commit."""
        step = self.cache.begin(self.slots)
        for layer in range(len(self.cache.layers)):
            y = decode_layer(self.cache, layer, step, *self.inputs, self.weights)
        self.cache.commit(step)
        return y


def layer_weights(cache: ReplayCache, generator: torch.Generator) -> Any:
    """Parameters as engines keep them: the convolution's as activations (laid out by tap), the others in fp32, no
    bias."""
    changes = {"beta_scale": 1.0} if cache.recurrence.delta else {}
    weights = cast(make_weights(cache, generator, conv_bias=None, **changes), cache.device)
    return weights._replace(conv_weight=weights.conv_weight.to(cache.dtype).t().contiguous().t())


def stack(case: str, rows: int, width: float) -> int:
    """Layers that make the L2 cache cold: 400 MB of state that is read, `width` bytes an element, 2 to 48 of them."""
    _, (H, _, V, K) = CASES[case]
    return max(2, min(48, math.ceil(400_000_000 / (rows * H * V * K * width))))


def measure(
    case: str, rows: int, fmt: str, others: list[dict[str, Any]], ceiling: dict[str, float]
) -> list[dict[str, Any]]:
    """One row for staggered flushes and one for flushes in phase.

    Raises:
        RuntimeError: the case fails its check. Nothing is written for it.
    """
    errors = check(case, rows, fmt)
    best = min(others, key=lambda other: other["us"])
    measured = []
    for staggered in (True, False):
        layers = stack(case, rows, storage.get(fmt).read_bytes(CASES[case][1].K))
        ours = _Ours(case, rows, fmt, layers, staggered)
        steps = [us / layers for us in replay(ours.step, 2 * WINDOW, 8 * WINDOW)]
        windows = sorted(sum(steps[i : i + WINDOW]) / WINDOW for i in range(0, len(steps), WINDOW))
        us, by_step = median(windows), [median(steps[i::WINDOW]) for i in range(WINDOW)]
        low, *_, high = quantiles(windows, n=5)
        traffic, (H, _, V, _) = ours.cache.bytes_per_token(), ours.geometry
        moved = rows * ((traffic.read + traffic.written) / layers + 2 * (ours.inputs.x.shape[2] + H * V))
        measured.append(
            {
                "bench": "decode",
                "case": case,
                "recurrence": ours.recurrence.name,
                "geometry": {"B": rows} | ours.geometry._asdict(),
                "tokens": 1,
                "format": fmt,
                "window": WINDOW,
                "staggered": staggered,
                "layers": layers,
                "us": us,
                "us_p20": low,
                "us_p80": high,
                "step_us_median": median(steps),
                "step_us_slowest": max(by_step),
                "baseline": best["name"],
                "baseline_launch": best["launch"],
                "baseline_us": best["us"],
                "baselines_us": {other["name"]: other["us"] for other in others},
                "speedup": best["us"] / us,
                "speedup_fp32": min(other["us"] for other in others if other["state"] == "float32") / us,
                "bytes": moved,
                "gbps": moved / us / 1e3,
                "share_of_read_ceiling": moved / us / 1e3 / ceiling["read_gbps"],
                "ceilings": ceiling,
                "check": errors,
            }
        )
        del ours
        torch.cuda.empty_cache()
    return measured


def stored_wider(fmt: str) -> list[torch.dtype]:
    """States of public kernels with as many bits as a format's checkpoint, or more."""
    return [state for state in (torch.float32, torch.bfloat16) if 8 * state.itemsize >= storage.get(fmt).kind.bits]


def public(case: str, rows: int, state: torch.dtype, known: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Name, launch and us of every public kernel that runs this case."""
    name, geometry = CASES[case]
    layers = stack(case, rows, state.itemsize)
    ours = _Ours(case, rows, "fp32", 1, True)
    results = []
    for kind in baselines.kinds(name):
        try:
            launch = None if known is None else nearest(known, kind, geometry, rows, state)
            step = baselines.build(kind, geometry, rows, layers, state, ours.inputs, ours.weights, launch)
        except ValueError as refusal:  # this kernel keeps no such state
            print(f"{kind} {case} {state}: {refusal}")
            continue
        us = baselines.microseconds(step.run, layers, 30)
        results.append({"name": step.name, "state": str(state).removeprefix("torch."), "launch": step.launch, "us": us})
        del step
        torch.cuda.empty_cache()
    return results


def nearest(
    known: list[dict[str, Any]], kind: str, geometry: Geometry, rows: int, state: torch.dtype
) -> dict[str, int] | None:
    """The launch found for the same kernel, head dims and state, and the closest batch; None if there is none."""
    same = [
        entry
        for entry in known
        if entry["kind"] == kind
        and (entry["geometry"]["V"], entry["geometry"]["K"]) == (geometry.V, geometry.K)
        and entry["state"] == str(state).removeprefix("torch.")
    ]
    best = min(same, key=lambda entry: abs(entry["batch"] - rows), default=None)
    return None if best is None else dict(best["launch"])


@torch.inference_mode()
def check(
    case: str, rows: int, fmt: str, steps: int = 20, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Largest relative errors of outputs and states, of three rows over `steps` tokens.

    `y`, `state` are against the recurrence in fp64, `y_torch`, `state_torch` against torch with the same format.

    Raises:
        RuntimeError: one is larger than rounding explains.
    """
    ours = _Ours(case, rows, fmt, 1, True, device, dtype)
    some = torch.tensor(sorted({0, rows // 2, rows - 1}), device=device)
    yardsticks = [
        ReplayCache(
            ours.recurrence.name, ours.geometry, layers=1, slots=rows, window=WINDOW, format=of, dtype=dtype,
            conv=ours.cache.conv, device=device, implementation=implementation,
        )
        for of, implementation in (("fp64", "reference"), (fmt, "torch"))
    ]  # fmt: skip
    for cache in yardsticks:
        cache.reset(cache.allocate(rows))
    generator = torch.Generator().manual_seed(1)
    errors = dict.fromkeys(("y", "y_torch"), 0.0)
    for _ in range(steps):
        for mine, new in zip(ours.inputs, make_inputs(ours.cache, rows, 1, generator), strict=True):
            if mine is not None and new is not None:
                mine.copy_(new)
        y = ours.step()[some].double()
        x, raw_g, raw_w = ours.inputs
        raw_g = None if raw_g is None else raw_g[some]
        for cache, name in zip(yardsticks, ("y", "y_torch"), strict=True):
            step = cache.begin(some)
            expected = decode_layer(cache, 0, step, x[some], raw_g, raw_w[some], ours.weights).double()
            cache.commit(step)
            errors[name] = max(errors[name], float((y - expected).norm() / expected.norm()))
    state = ours.cache.materialize(0, some).double()
    for cache, name in zip(yardsticks, ("state", "state_torch"), strict=True):
        expected = cache.materialize(0, some).double()
        errors[name] = float((state - expected).norm() / expected.norm())
    allowed = {f"{name}_torch": most + SHARE * errors[name] for name, most in ROUNDING.items()}
    if storage.get(fmt).kind.bits == 32:
        allowed["state"] = ROUNDING["state"]
    if not all(errors[name] < most for name, most in allowed.items()):
        raise RuntimeError(f"{case} B={rows} {fmt}: errors {errors}, allowed {allowed}; no row is written")
    return errors


def ceilings() -> dict[str, float]:
    """GB/s of the device: a sum over 4 GiB of fp32, and as much read and written (both counted)."""
    x = torch.randn(1 << 30, device="cuda")
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()
    return {
        "read_gbps": size / median(replay(x.sum, 3, 20)) / 1e3,
        "copy_gbps": 2 * size / median(replay(lambda: torch.neg(x, out=y), 3, 20)) / 1e3,
    }

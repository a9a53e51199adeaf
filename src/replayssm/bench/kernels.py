"""GPU: one recurrent layer's decode step, ours against the public kernels, whole intervals with their flushes.

How it is measured. A CUDA graph holds one step of a model of `layers` equal layers (begin, every layer, commit), so
that each layer finds the L2 cache cold, as in a model; it is replayed, and events stand between replays. A figure is
the mean of a whole window of steps over the layers, in which every row flushes once; a row of results holds the
median of such means with their 20 and 80 % percentiles. `staggered` rows flush in different steps, otherwise all in
one. The public kernels run in graphs over as many layers, with the same inputs. Both sides cover convolution, gates,
norms, state, skip.

With `--tokens` a step brings drafts. How many count is drawn beforehand (1 + binomial, mean `--accepted`), for every
row and step, and is the same for all that is compared; it is put in place between replays, outside of what is timed.
A `--tree` is accepted along its deepest path; its row has the chain of as many tokens beside it.

A row is written only after the same case has passed its check: outputs and states of some rows, over more than a
window, against implementation `torch` with the same format, slots, seed and flush numbers, which encodes bit for bit
as the kernels do; and against the recurrence in fp64 (with the same bf16 activations), which says what the format
loses. Ceilings (a sum, a copy of 4 GiB) are measured first, in the same run. Bytes are those of the planner
(plan.replayed_bytes): state, records, and what goes in and out.

The baseline is the fastest public kernel whose state has as many bits as the format's checkpoint, or more: fp32 for
32 bits, fp32 or bf16 for 16 bits and less (none keeps 8 or 4). `baselines_us` has all of them; `speedup_fp32` is
against the fastest that keeps fp32.
"""

import json
import math
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from replayssm import ConvGeometry, Geometry, ReplayCache, decode_layer, launch_choices, plan, recurrences
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
# Public kernels of drafts, from fp64: their convolutions round every product to bf16, a bf16 state after every token.
PUBLIC = {torch.float32: (8e-3, 8e-3), torch.bfloat16: (16e-2, 4e-2)}
# parents of a tree of up to 8 nodes and its deepest path: two choices at every depth but the last
TREE, DEEPEST = [-1, 0, 0, 1, 1, 3, 3, 5], [0, 1, 3, 5, 7]
LAYERS = 12  # of ours at least, which share begin and commit: models have 18 to 45 such layers (catalogue.py)
DRAWS = 256  # steps whose accepted counts are drawn


class Steps(NamedTuple):
    """What the steps of a measurement are like.

    Attributes:
        window: committed records that may wait.
        tokens: of a row and step.
        accepted: how many of them count on average.
        tree: they are a tree.
    """

    window: int = WINDOW
    tokens: int = 1
    accepted: float = 1.0
    tree: bool = False

    def counts(self, rows: int) -> Tensor:
        """How many tokens count in every step and row: int64 [DRAWS, rows] from 1 to all (of a tree, its depth)."""
        most = sum(node < self.tokens for node in DEEPEST) if self.tree else self.tokens
        if most == 1:
            return torch.ones(DRAWS, rows, dtype=torch.int64)
        share = torch.full((DRAWS, rows), (self.accepted - 1) / (most - 1), dtype=torch.float64)
        generator = torch.Generator().manual_seed(2)
        return 1 + torch.binomial(torch.full_like(share, most - 1), share, generator).long()


Item = TypeVar("Item")
# Options of all commands that measure cells
CaseOption = Annotated[list[str], typer.Option(help=f"Of {', '.join(CASES)}.")]
BatchOption = Annotated[str, typer.Option(help="Rows, several with commas.")]
FormatOption = Annotated[str, typer.Option("--format", help="Storage formats, several with commas.")]
WindowOption = Annotated[int, typer.Option(help="Committed records that may wait.")]
TokensOption = Annotated[int, typer.Option(help="Of a row and step: 1, or 1 + drafts.")]
AcceptedOption = Annotated[float, typer.Option(help="How many of a step's tokens count on average.")]
CommitOption = Annotated[str | None, typer.Option(help="The commit that runs, where there is no git.")]


def cells_of(case: list[str], batch: str, formats: str) -> list[tuple[str, int, str]]:
    """Case, rows and format of everything that was asked for."""
    return [(name, int(rows), fmt) for name in case for rows in batch.split(",") for fmt in formats.split(",")]


def share(items: list[Item], text: str) -> list[Item]:
    """Of "I/N": every N-th item from the I-th."""
    first, every = map(int, text.split("/"))
    return items[first::every]


def main(
    case: CaseOption = list(CASES),  # noqa: B006
    batch: Annotated[str | None, typer.Option(help="Rows, several with commas: 1,8,32,256, and 512 of drafts.")] = None,
    window: WindowOption = WINDOW,
    tokens: TokensOption = 1,
    accepted: AcceptedOption = 1.0,
    tree: Annotated[bool, typer.Option(help="The tokens are a tree, 3 to 8 nodes.")] = False,
    formats: FormatOption = "fp32,split16,bf16",
    launches: Annotated[
        Path | None, typer.Option(help="Launch choices of the public kernels; searched if not given.")
    ] = None,
    commit: CommitOption = None,
    seconds: Annotated[float, typer.Option(help="Start no further case after so long.")] = 3600.0,
    only_compile: Annotated[
        str | None, typer.Option(help="I/N: compile the kernels of every N-th case from the I-th, measure nothing.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Rows are appended here.")] = Path("results/kernels.jsonl"),
) -> None:
    """Decoding on a GPU, plain or of drafts, against vLLM's and flash-linear-attention's kernels."""
    steps = Steps(window, tokens, accepted, tree)
    most = sum(node < tokens for node in DEEPEST) if tree else tokens
    if not 1 <= accepted <= most or (tree and not 3 <= tokens <= len(TREE)):
        raise typer.BadParameter(
            f"--accepted must be 1 to {most}, a tree's tokens 3 to {len(TREE)}; got {accepted:g} of {tokens} tokens."
        )
    if tokens > 1:
        case = [name for name in case if baselines.kinds(CASES[name][0], drafts=True)]
    batch = batch or ("1,8,32,256" if tokens == 1 else "1,8,32,256,512")
    cells = cells_of(case, batch, formats)
    if only_compile:
        for cell in share(cells, only_compile):
            _Ours(*cell, layers=1, staggered=True, steps=steps).step()
        torch.cuda.synchronize()
        return
    console, started = Console(width=150), time.monotonic()
    known = json.loads(launches.read_text()) if launches else None
    origin = provenance(commit) | {"gpu": torch.cuda.get_device_name()}
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
                found[key] = public(name, rows, state, known, steps)
            others += found[key]
        for row in measure(name, rows, fmt, others, ceiling, steps):
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
        self, case: str, rows: int, fmt: str, layers: int, staggered: bool, steps: Steps, device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        name, self.geometry = CASES[case]
        self.recurrence = recurrences.get(name)
        generator = torch.Generator().manual_seed(0)
        self.cache = ReplayCache(
            name, self.geometry, layers=layers, slots=rows, window=steps.window, max_tokens=steps.tokens, format=fmt,
            dtype=dtype, conv=ConvGeometry(self.recurrence.conv_channels(self.geometry), 4), staggered=staggered,
            device=device, implementation="triton",
        )  # fmt: skip
        self.slots = self.cache.allocate(rows)
        self.cache.reset(self.slots)
        self.weights = layer_weights(self.cache, generator)
        x, raw_g, raw_w = make_inputs(self.cache, rows, steps.tokens, generator)
        self.inputs = LayerInputs(x.to(device), None if raw_g is None else raw_g.to(device), raw_w.to(device))
        self.tokens, self.parent, self.draws = steps.tokens, None, steps.counts(rows).to(device)
        self.counts = self.draws[0].clone()
        self.path = torch.empty(rows, 0, dtype=torch.int64, device=device)
        if steps.tree:
            nodes = torch.tensor([node for node in DEEPEST if node < steps.tokens], device=device)
            self.parent = torch.tensor(TREE[: steps.tokens], device=device).expand(rows, -1).contiguous()
            self.path = nodes.expand(rows, -1).contiguous()
            self.nodes = self.path.clone()
        self.at = 0
        self.draw()

    def draw(self) -> None:
        """The next step's accepted counts into place."""
        self.counts.copy_(self.draws[self.at % DRAWS])
        if self.parent is not None:
            inside = torch.arange(self.path.shape[1], device=self.path.device) < self.counts[:, None]
            self.path.copy_(torch.where(inside, self.nodes, -1))
        self.at += 1

    def step(self) -> Tensor:
        """begin, every layer, commit."""
        step = self.cache.begin(self.slots, tokens=self.tokens, parent=self.parent)
        for layer in range(len(self.cache.layers)):
            y = decode_layer(self.cache, layer, step, *self.inputs, self.weights)
        if self.parent is not None:
            self.cache.commit(step, path=self.path)
        else:
            self.cache.commit(step, None if self.tokens == 1 else self.counts)
        return y


def layer_weights(cache: ReplayCache, generator: torch.Generator) -> Any:
    """Parameters as engines keep them: the convolution's and dt_bias as activations, no bias. Taps lie side by side."""
    changes = {"beta_scale": 1.0} if cache.recurrence.delta else {}
    weights = cast(make_weights(cache, generator, conv_bias=None, **changes), cache.device)
    dt_bias = weights.dt_bias.to(cache.dtype).float()
    return weights._replace(conv_weight=weights.conv_weight.to(cache.dtype).t().contiguous().t(), dt_bias=dt_bias)


def stack(case: str, rows: int, width: float, least: int) -> int:
    """Layers that make the L2 cache cold: 400 MB of state that is read, `width` bytes an element; at most 48."""
    _, (H, _, V, K) = CASES[case]
    return max(least, min(48, math.ceil(400_000_000 / (rows * H * V * K * width))))


def measure(
    case: str, rows: int, fmt: str, others: list[dict[str, Any]], ceiling: dict[str, float], of: Steps
) -> list[dict[str, Any]]:
    """One row for staggered flushes and, of plain decoding, one for flushes in phase.

    Raises:
        RuntimeError: the case fails its check. Nothing is written for it.
    """
    errors, best = check(case, rows, fmt, of), min(others, key=lambda other: other["us"])
    measured = []
    for staggered in (True, False) if of.tokens == 1 else (True,):
        ours, steps = timed(case, rows, fmt, of, staggered)
        windows = sorted(means(steps, of.window))
        us, by_step = median(windows), [median(steps[i :: of.window]) for i in range(of.window)]
        low, *_, high = quantiles(windows, n=5)
        layers, (H, _, V, K) = len(ours.cache.layers), ours.geometry
        layer = plan.Layer(ours.recurrence.name, ours.geometry, 4)
        moved = rows * plan.replayed_bytes(layer, fmt, of.window, of.tokens, of.accepted, rows).total
        held, state = ours.cache.nbytes, H * V * K * getattr(torch, best["state"]).itemsize
        row = {
            "bench": "decode",
            "case": case,
            "recurrence": ours.recurrence.name,
            "geometry": {"B": rows} | ours.geometry._asdict(),
            "tokens": of.tokens,
            "format": fmt,
            "window": of.window,
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
        if of.tokens > 1:
            row |= {
                "accepted": float(ours.draws.double().mean()),
                "tree": TREE[: of.tokens] if of.tree else None,
                "states_held": (held.total - held.cursors) / (rows * layers * state),
                "baseline_states_held": best["nbytes"] / state,
            }
        del ours
        torch.cuda.empty_cache()
        if of.tree:
            chain, steps = timed(case, rows, fmt, of._replace(tree=False), staggered, of)
            row["chain_us"] = median(means(steps, of.window))
            del chain
            torch.cuda.empty_cache()
        measured.append(row)
    return measured


def stored_wider(fmt: str) -> list[torch.dtype]:
    """States of public kernels with as many bits as a format's checkpoint, or more."""
    return [state for state in (torch.float32, torch.bfloat16) if 8 * state.itemsize >= storage.get(fmt).kind.bits]


def means(steps: list[float], window: int) -> list[float]:
    """Of every whole window of steps: each has its flushes."""
    return [sum(steps[i : i + window]) / window for i in range(0, len(steps), window)]


def timed(
    case: str, rows: int, fmt: str, of: Steps, staggered: bool, tree: Steps | None = None, windows: int = 8
) -> tuple[_Ours, list[float]]:
    """Ours, and microseconds per layer of its steps; accepted counts as of `tree`, if given."""
    layers = stack(case, rows, storage.get(fmt).read_bytes(CASES[case][1].K), LAYERS)
    ours = _Ours(case, rows, fmt, layers, staggered, of)
    if tree:
        ours.draws = tree.counts(rows).cuda()
    before = None if of.tokens == 1 else ours.draw
    return ours, [us / layers for us in replay(ours.step, 2 * of.window, windows * of.window, before)]


def public(
    case: str, rows: int, state: torch.dtype, known: list[dict[str, Any]] | None, of: Steps
) -> list[dict[str, Any]]:
    """Name, launch, us and bytes held per request of every public kernel that runs this case."""
    name, geometry = CASES[case]
    layers = stack(case, rows, state.itemsize, 2)
    ours = _Ours(case, rows, "fp32", 1, True, of._replace(tree=False))
    accepted = torch.ones(rows, dtype=torch.int32, device="cuda") if of.tokens > 1 else None
    results = []
    for kind in baselines.kinds(name, of.tokens > 1):
        try:
            launch = None if known is None else nearest(known, kind, geometry, rows, state)
            step = baselines.build(kind, geometry, rows, layers, state, ours.inputs, ours.weights, launch, accepted)
        except ValueError as refusal:  # this kernel keeps no such state
            print(f"{kind} {case} {state}: {refusal}")
            continue
        if accepted is None:
            us = baselines.microseconds(step.run, layers, 30)
        else:
            check_public(step, case, rows, state, of, ours, accepted)
            us = baselines.microseconds(step.run, layers, 30, _Drawn(accepted, of.counts(rows).int().cuda()))
        results.append(
            {
                "name": step.name,
                "state": str(state).removeprefix("torch."),
                "launch": step.launch,
                "us": us,
                "nbytes": step.nbytes,
            }  # fmt: skip
        )
        del step
        torch.cuda.empty_cache()
    return results


class _Drawn:
    """Puts the accepted counts of one step after another into place."""

    def __init__(self, accepted: Tensor, draws: Tensor) -> None:
        self.accepted, self.draws, self.at = accepted, draws, 0

    def __call__(self) -> None:
        self.accepted.copy_(self.draws[self.at % DRAWS])
        self.at += 1


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


class _Beside:
    """Some rows of a case, on the same slots and with the same activations, by another implementation or format."""

    def __init__(self, ours: _Ours, rows: int, of: Steps, fmt: str, implementation: str) -> None:
        device = ours.cache.device
        self.some = torch.tensor(sorted({0, rows // 2, rows - 1}), device=device)
        self.of, self.ours = of, ours
        self.cache = ReplayCache(
            ours.recurrence.name, ours.geometry, layers=1, slots=rows, window=of.window, max_tokens=of.tokens,
            format=fmt, dtype=ours.cache.dtype, conv=ours.cache.conv, device=device, implementation=implementation,
        )  # fmt: skip
        self.cache.reset(self.cache.allocate(rows))
        self.generator = torch.Generator().manual_seed(1)

    def renew(self) -> None:
        """New inputs in place of ours."""
        new = make_inputs(self.ours.cache, len(self.ours.slots), self.of.tokens, self.generator)
        for mine, other in zip(self.ours.inputs, new, strict=True):
            if mine is not None and other is not None:
                mine.copy_(other)

    def step(self) -> Tensor:
        """y [some, T, H, V]; accepted counts are those that ours has."""
        parent = None if self.ours.parent is None else self.ours.parent[self.some]
        step = self.cache.begin(self.some, tokens=self.of.tokens, parent=parent)
        x, raw_g, raw_w = self.ours.inputs
        raw_g = None if raw_g is None else raw_g[self.some]
        y = decode_layer(self.cache, 0, step, x[self.some], raw_g, raw_w[self.some], self.ours.weights).double()
        if parent is not None:
            self.cache.commit(step, path=self.ours.path[self.some])
        else:
            self.cache.commit(step, self.ours.counts[self.some])
        return y

    def state(self) -> Tensor:
        """[some, H, V, K]"""
        return self.cache.materialize(0, self.some)


def relative(x: Tensor, expected: Tensor) -> float:
    """|x - expected| / |expected|"""
    return float((x.double() - expected).norm() / expected.norm())


def steps_to_check(of: Steps) -> int:
    """More than a window."""
    return math.ceil(1.25 * of.window / of.accepted) + 1


@torch.inference_mode()
def check(
    case: str, rows: int, fmt: str, of: Steps, device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
    steps: int | None = None,
) -> dict[str, float]:  # fmt: skip
    """Largest relative errors of outputs and states, of three rows over `steps` steps, or more than a window.

    `y`, `state` are against the recurrence in fp64, `y_torch`, `state_torch` against torch with the same format.

    Raises:
        RuntimeError: one is larger than rounding explains.
    """
    ours = _Ours(case, rows, fmt, 1, True, of, device, dtype)
    exact = _Beside(ours, rows, of, "fp64", "reference")
    # a checkpoint that is updated at every token is also what tokens read
    at_once = launch_choices.launch(ours.recurrence, ours.geometry, fmt, rows, of.tokens, of.window).at_once
    alike = _Beside(ours, rows, of, "fp32" if at_once else fmt, "torch")
    errors = dict.fromkeys(("y", "y_torch"), 0.0)
    for _ in range(steps or steps_to_check(of)):
        exact.renew()
        ours.draw()
        y = ours.step()[exact.some]
        for name, beside in (("y", exact), ("y_torch", alike)):
            errors[name] = max(errors[name], relative(y, beside.step()))
    state = ours.cache.materialize(0, exact.some)
    errors |= {name: relative(state, beside.state()) for name, beside in (("state", exact), ("state_torch", alike))}
    allowed = {f"{name}_torch": most + SHARE * errors[name] for name, most in ROUNDING.items()}
    if storage.get(fmt).kind.bits == 32:
        allowed["state"] = ROUNDING["state"]
    if not all(errors[name] < most for name, most in allowed.items()):
        raise RuntimeError(f"{case} B={rows} {fmt}: errors {errors}, allowed {allowed}; no row is written")
    return errors


@torch.inference_mode()
def check_public(
    step: baselines.Step, case: str, rows: int, state: torch.dtype, of: Steps, ours: _Ours, accepted: Tensor
) -> None:
    """The same for a public kernel of drafts.

    Raises:
        RuntimeError: an error is larger than rounding explains: it is not what ours is compared with.
    """
    exact, worst = _Beside(ours, rows, of._replace(tree=False), "fp64", "reference"), 0.0
    accepted.fill_(1)
    for _ in range(steps_to_check(of)):
        exact.renew()
        ours.draw()
        y = step.run(0)[exact.some]
        worst = max(worst, relative(y, step.answer(exact.step())))
        accepted.copy_(ours.counts)
    off = relative(step.state(0)[exact.some], exact.state())
    most_y, most_state = PUBLIC[state]
    if not (worst < most_y and off < most_state):
        raise RuntimeError(f"{step.name}, {case} B={rows}: outputs off by {worst:.2g}, states by {off:.2g}")


def ceilings() -> dict[str, float]:
    """GB/s of the device: a sum over 4 GiB of fp32, and as much read and written (both counted)."""
    x = torch.randn(1 << 30, device="cuda")
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()
    return {
        "read_gbps": size / median(replay(x.sum, 3, 20)) / 1e3,
        "copy_gbps": 2 * size / median(replay(lambda: torch.neg(x, out=y), 3, 20)) / 1e3,
    }

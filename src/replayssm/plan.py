"""What replay gives for a model, a GPU, a batch and drafts, before anything is run: bytes, times, memory, and whether.

    bytes    derived from the recurrence, the format and the window; the same count as ReplayCache.bytes_per_token
    kernel   us of one recurrent layer's step = bytes / ceiling + what measured kernels take beyond it
    step     rest of the model at its limits + layers x kernel
    memory   checkpoint + ring + convolution inputs per request, against the stock scheme's states

The stock scheme reads the state once a step and writes it once per token; with drafts it keeps 1 + drafts states per
request, as engines do. What kernels take beyond the ceiling is fitted to measured rows by `fit`, and kept with its
command in kernel_times.json; a GPU without rows borrows the constants of one that has them, its bytes at its own speed.

Bytes are B, times us or ms, speeds GB/s (1e9). Letters as everywhere: B rows, T tokens, H G V K.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from replayssm import checks, formats, recurrences
from replayssm.catalogue import ACTIVATION, Gpu, Model, data, gpus
from replayssm.recurrences import Geometry
from replayssm.ring import in_one_launch, updates_at_once

SCHEMA = "replayssm.plan/1"
USABLE = 0.9  # of a GPU's memory, as engines take by default
REST = (1.0, 4.0)  # how many times its limits the rest of a model takes in engines; _assumptions says from where
WINDOWS = (4, 8, 12, 16, 24, 32, 48, 64)
MOST_ROWS = 1024
STATE = {"fp32": 4, "bf16": 2}  # bytes of a stock state's element


# --- what was measured on a GPU ---------------------------------------------------------------------------------------


FIRST_ROUND = 8.448  # thousand rows of V: 4 programs of 16 rows on each of an H200's 132 processors


class Replayed(NamedTuple):
    """What a replayed step takes beyond its bytes at the read ceiling.

    Attributes:
        launch: us of a step however small; apart: us more where it takes several launches (ring.in_one_launch).
        carry: us per MB of ring, convolution inputs, activations: the carry in front of the read.
        flush: us per thousand rows of V that are folded in a step, beyond FIRST_ROUND, which other work hides.
        wait: us by which one due row of 16 records delays a step; the more rows are due, the better it hides.
        decode: us per million state elements of a format, by its name.
    """

    launch: float
    apart: float
    carry: float
    flush: float
    wait: float
    decode: dict[str, float]


class Stock(NamedTuple):
    """What a public kernel takes beyond its bytes at the copy ceiling: us a step, us per MB of state and of others."""

    launch: float
    state: float
    other: float


class Times(NamedTuple):
    """Kernel times of one GPU, fitted to rows or carried over from a GPU that has some.

    Attributes:
        read, copy: ceilings in GB/s.
        error: the largest relative one at 32 rows and more, of either side.
        windows: of the rows; others are extrapolated.
        replayed, stock: by recurrence.
        origin: one sentence: which rows, or which other GPU's.
    """

    read: float
    copy: float
    error: float
    windows: tuple[int, ...]
    replayed: dict[str, Replayed]
    stock: dict[str, Stock]
    origin: str


def times(of: Gpu, table: dict[str, Any] | None = None) -> Times:
    """Kernel times of a GPU, from a table as `fit` makes it (None: kernel_times.json)."""
    table = table or data("kernel_times.json")
    measured = table["gpus"]
    device = of.device if of.device in measured else next(iter(measured))
    entry, ratio = measured[device], 1.0
    if device == of.device:
        origin = f"fitted to {entry['rows']} rows measured on {device} ({table['command']})"
    else:
        by_device = {other.device: other for other in gpus().values()}
        ratio = by_device[device].bandwidth / of.bandwidth
        origin = (
            f"NOT measured on {of.name}: ceilings, and times per byte, of {device} scaled by the nominal bandwidths "
            f"({by_device[device].bandwidth:,.0f} to {of.bandwidth:,.0f} GB/s); launches and waits taken as there"
        )
    return Times(
        read=entry["read_gbps"] / ratio,
        copy=entry["copy_gbps"] / ratio,
        error=max(entry.get("largest_error", {}).get("B >= 32", {"replayed": 0.0}).values()),
        windows=tuple(entry["windows"]),
        replayed={
            name: Replayed(
                c["launch"],
                c["apart"],
                c["carry"] * ratio,
                c["flush"],
                c["wait"],
                {fmt: us * ratio for fmt, us in c["decode"].items()},
            )
            for name, c in entry["replayed"].items()
        },
        stock={name: Stock(c["launch"], c["state"] * ratio, c["other"] * ratio) for name, c in entry["stock"].items()},
        origin=origin,
    )


# --- bytes ------------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One recurrent layer of a model on one device."""

    recurrence: str
    geometry: Geometry
    conv_width: int

    @property
    def elements(self) -> int:
        """Of one state: H V K."""
        H, _, V, K = self.geometry
        return H * V * K

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return recurrences.get(self.recurrence).conv_channels(self.geometry)

    @property
    def record(self) -> int:
        """Bytes of a ring record: k and v as activations; gates, weight and the delta rule's norm in fp32."""
        (H, G, V, K), known = self.geometry, recurrences.get(self.recurrence)
        gates = H * known.gate_dim(self.geometry) + H + (G if known.delta else 0)
        return ACTIVATION * (G * K + H * V) + 4 * gates

    def back(self, tokens: int) -> int:
        """Bytes of one number of every head's `back`, which kernels keep where steps bring several tokens; or 0."""
        known = recurrences.get(self.recurrence)
        return 4 * self.geometry.H if tokens > 1 and known.delta and not known.channel_gate else 0


class Moved(NamedTuple):
    """Bytes that one row moves in one step of one layer, flushes spread over the steps.

    Attributes:
        checkpoint: read by tokens.
        ring_read, ring_written: records.
        flush_read, flush_written: what a flush moves beyond what tokens have read already; in the stock scheme, the
            states that every step writes.
        conv_read, conv_written: convolution inputs.
        activations: the step's inputs and outputs.
        due: flushes per step, and `folded` the records of one.
        at_once: every step updates the checkpoint, in one launch.
    """

    checkpoint: float
    ring_read: float
    ring_written: float
    flush_read: float
    flush_written: float
    conv_read: float
    conv_written: float
    activations: float
    due: float
    folded: float
    at_once: bool = False

    @property
    def read(self) -> float:
        """State read."""
        return self.checkpoint + self.ring_read + self.flush_read + self.conv_read

    @property
    def written(self) -> float:
        """State written."""
        return self.ring_written + self.flush_written + self.conv_written

    @property
    def total(self) -> float:
        """All bytes."""
        return self.read + self.written + self.activations

    @property
    def beside(self) -> float:
        """What the carry moves: all but checkpoint and flushes."""
        return self.ring_read + self.ring_written + self.conv_read + self.conv_written + self.activations


def element_bytes(format: str, K: int) -> tuple[float, float]:
    """Bytes kept, and bytes read per token, of one state element.

    Raises:
        ValueError: there is no such format.
    """
    fmt = formats.get(format)
    return fmt.stored_bytes(K), fmt.read_bytes(K)


def replayed_bytes(
    layer: Layer, format: str, window: int, tokens: int = 1, accepted: float = 1.0, rows: int | None = None
) -> Moved:
    """A step of `tokens` tokens of which `accepted` are committed on average, as the GPU implementation moves them.

    A slot is due when the step's tokens would pass the window. It then holds more than window - tokens records, by half
    a step's worth on average.

    Args:
        rows: of the step; so few may be updated at once, every token reading and writing the whole state and a record.
            None: many.
    """
    (H, _, V, K), delta = layer.geometry, recurrences.get(layer.recurrence).delta
    if rows and tokens == 1 and updates_at_once(rows, H * V, delta, formats.get(format)):
        each = replayed_bytes(layer, format, 1)
        state, record = layer.elements * STATE["fp32"], layer.record
        return each._replace(checkpoint=state, ring_read=0.0, flush_read=record, at_once=True)
    (stored, read), C = element_bytes(format, K), layer.channels
    folded = max(window - tokens + (accepted + 1) / 2, accepted)
    due = accepted / folded
    seen, back = max(window - tokens, 0) / 2 + tokens, layer.back(tokens)
    return Moved(
        checkpoint=layer.elements * read,
        ring_read=seen * layer.record + seen**2 / 2 * back,
        ring_written=tokens * (layer.record + seen * back),
        flush_read=due * (layer.elements * (stored - read) + folded * layer.record + folded**2 / 2 * back),
        flush_written=due * layer.elements * stored,
        conv_read=(layer.conv_width - 1) * C * ACTIVATION,
        conv_written=tokens * C * ACTIVATION,
        activations=tokens * (C + H * V) * ACTIVATION,
        due=due,
        folded=folded,
    )


def stock_bytes(layer: Layer, element: int = 4, tokens: int = 1) -> Moved:
    """The stock scheme: the state read once, and written once per token; the convolution's window likewise."""
    C, (H, _, V, _) = layer.channels, layer.geometry
    window = (layer.conv_width - 1) * C * ACTIVATION
    return Moved(
        checkpoint=layer.elements * element,
        ring_read=0.0,
        ring_written=0.0,
        flush_read=0.0,
        flush_written=tokens * layer.elements * element,
        conv_read=window,
        conv_written=window + (tokens - 1) * C * ACTIVATION,
        activations=tokens * (C + H * V) * ACTIVATION,
        due=1.0,
        folded=tokens,
    )


def replayed_memory(layer: Layer, format: str, window: int, drafts: int = 0) -> float:
    """Bytes of one request in one layer: as ReplayCache.nbytes without its cursors, which all layers share."""
    tokens, places = 1 + drafts, window + 1 + drafts
    conv = (layer.conv_width - 1 + tokens) * layer.channels * ACTIVATION
    stored, _ = element_bytes(format, layer.geometry.K)
    return layer.elements * stored + places * layer.record + places**2 * layer.back(tokens) + conv


def stock_memory(
    layer: Layer, element: int = 4, drafts: int = 0, conv_places: int | None = None, activation: int = ACTIVATION
) -> float:
    """Bytes of one request in one layer: 1 + drafts states, each with its convolution inputs.

    Args:
        conv_places: inputs kept per channel; None: width - 1 + drafts, as vLLM keeps them (Transformers keeps width).
    """
    places = layer.conv_width - 1 + drafts if conv_places is None else conv_places
    return (1 + drafts) * (layer.elements * element + places * layer.channels * activation)


# --- times ------------------------------------------------------------------------------------------------------------


def _beyond(layer: Layer, rows: int, moved: Moved, tokens: int) -> tuple[float, ...]:
    """What Replayed's constants are multiplied with, in its order: 1, 0 or 1, MB, 1000 rows, waits, million elements.

    The carry of every token walks the ring, which is read once.
    """
    if moved.at_once:
        return 1.0, 0.0, rows * moved.beside / 1e6, 0.0, 0.0, rows * layer.elements / 1e6
    flushes = rows * moved.due
    walked = moved.beside + (tokens - 1) * moved.ring_read
    wait = min(1.0, flushes) / math.sqrt(max(1.0, flushes)) * moved.folded / 16
    flush = max(0.0, flushes * layer.geometry.H * layer.geometry.V / 1e3 - FIRST_ROUND) * moved.folded / 16
    apart = float(not in_one_launch(rows, layer.geometry.H))
    return 1.0, apart, rows * walked / 1e6, flush, wait, rows * layer.elements / 1e6


def replayed_us(of: Times, layer: Layer, rows: int, format: str, moved: Moved, tokens: int = 1) -> float:
    """Microseconds of one layer's step of `rows` rows.

    Raises:
        ValueError: the recurrence was never measured.
    """
    c = _constants(of.replayed, layer)
    decode = _decode_cost(of, c, format)
    factors = _beyond(layer, rows, moved, tokens)
    return rows * moved.total / of.read / 1e3 + math.fsum(
        x * us for x, us in zip(factors, (c.launch, c.apart, c.carry, c.flush, c.wait, decode), strict=True)
    )


def _decode_cost(of: Times, c: Replayed, format: str) -> float:
    """us per million elements: the recurrence's own, else the mean of others that have rows of the format, else the
    slowest format's."""
    if format in c.decode:
        return c.decode[format]
    others = [x.decode[format] for x in of.replayed.values() if format in x.decode]
    if others:
        return math.fsum(others) / len(others)
    return max(cost for x in of.replayed.values() for cost in x.decode.values())


def stock_us(of: Times, layer: Layer, rows: int, moved: Moved) -> float:
    """Microseconds of one layer's step in the stock scheme."""
    c = _constants(of.stock, layer)
    state, other = (rows * size / 1e6 for size in (moved.total - moved.beside, moved.beside))
    return rows * moved.total / of.copy / 1e3 + c.launch + c.state * state + c.other * other


def _constants(known: dict[str, Any], layer: Layer) -> Any:
    if layer.recurrence not in known:
        raise ValueError(f"no measured times for {layer.recurrence}: run `replayssm bench kernels` and `plan --fit`.")
    return known[layer.recurrence]


def rest_ms(
    model: Model, of: Gpu, bandwidth: float, rows: int, tokens: int, context: int, tp: int, bits: int
) -> tuple[float, float]:
    """The rest of a step at its limits, in ms: weights read once or multiplied at the peak; keys and values read once.

    The first is 0 if the model's size is unknown.
    """
    kv = rows * context * (model.kv_bytes or 0) / min(tp, model.kv_heads) / bandwidth / 1e6
    if model.size is None:
        return 0.0, kv
    total, active = model.size
    touched, weights = total, _weights(model, bits) or 0.0
    if model.experts and active < total:
        experts, chosen = model.experts
        share = chosen / experts
        shared = max(0.0, (active - total * share) / (1 - share))
        touched = shared + (total - shared) * (1 - (1 - share) ** (rows * tokens))
    read = weights * touched / total / tp / bandwidth / 1e6
    multiplied = 2 * active * rows * tokens / tp / of.tflops / 1e9
    return max(read, multiplied), kv


# --- the plan ---------------------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """What a plan is for, beside model and GPU."""

    batches: tuple[int, ...] = (1, 32, 256)
    drafts: tuple[int, ...] = (0,)
    formats: tuple[str, ...] = ("fp32", "split16", "bf16")
    window: int = 16
    accepted: float | None = None
    context: int = 4096
    tp: int = 1
    bits: int = 16
    state: str = "fp32"
    rest: float | None = None


class Case(NamedTuple):
    """One batch, number of drafts and format against the stock scheme. Bytes and times are of one step.

    Attributes:
        stock_kernel_us, kernel_us: one recurrent layer.
        rest_ms: the rest of the model: measured if given, else at its limits; 0: unknown.
        step_speedup: None: the rest is unknown. `step_speedup_low`: with weights and products at REST[1] times their
            limits.
        stock_fits, fits: whether so many requests have room.
    """

    batch: int
    drafts: int
    format: str
    window: int
    accepted: float
    stock_read: float
    stock_written: float
    read: float
    written: float
    stock_kernel_us: float
    kernel_us: float
    kernel_speedup: float
    rest_ms: float
    stock_step_ms: float
    step_ms: float
    step_speedup: float | None
    step_speedup_low: float | None
    stock_fits: bool
    fits: bool


class Memory(NamedTuple):
    """State of one request on one GPU, and how many requests fit beside the weights with their keys and values."""

    drafts: int
    format: str
    window: int
    stock: float
    replayed: float
    stock_requests: int
    requests: int


class Advice(NamedTuple):
    """Of all formats asked for and WINDOWS, the fastest at a batch; `exact`: of those that keep the state in fp32.

    `measured`: the windows of measured rows; others are extrapolated.
    """

    batch: int
    drafts: int
    format: str
    window: int
    kernel_speedup: float
    exact_format: str | None
    exact_window: int | None
    exact_speedup: float | None
    measured: tuple[int, ...]


class Pays(NamedTuple):
    """From which batch on replayed kernels are predicted to be the faster ones, up to MOST_ROWS; None: never.

    `slower_from`: the smallest batch at which they are not; None: there is none.
    """

    drafts: int
    format: str
    from_batch: int | None
    slower_from: int | None


class Plan(NamedTuple):
    """Everything that `replayssm plan` shows."""

    model: Model
    gpu: Gpu
    options: Options
    cases: list[Case]
    memory: list[Memory]
    advice: list[Advice]
    pays: list[Pays]
    assumptions: list[str]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        parts = {name: [x._asdict() for x in getattr(self, name)] for name in ("cases", "memory", "advice", "pays")}
        return {
            "schema": SCHEMA,
            "model": self.model._asdict() | {"geometry": self.model.geometry._asdict()},
            "gpu": self.gpu._asdict(),
            "options": self.options._asdict(),
            "assumptions": self.assumptions,
        } | parts


def on_device(model: Model, tp: int) -> Layer:
    """A model's recurrent layer on one of `tp` devices: value heads are split, key groups as far as they go.

    Raises:
        ValueError: the value heads can't be split so.
    """
    H, G, V, K = model.geometry
    if tp < 1 or H % tp:
        raise ValueError(f"--tp must divide the {H} value heads of {model.name}; got {tp}.")
    return Layer(model.recurrence, Geometry(H // tp, max(1, G // tp), V, K), model.conv_width)


class _Maker:
    """Model, GPU and options on one page, and the parts of their plan."""

    def __init__(self, model: Model, of: Gpu, options: Options, table: dict[str, Any] | None) -> None:
        self.model, self.gpu, self.options = model, of, options
        self.layer, self.times = on_device(model, options.tp), times(of, table)
        self.bytes_of = cache(self._bytes)

    def accepted(self, drafts: int) -> float:
        """Tokens that a step commits."""
        given = self.options.accepted
        return 1 + 0.6 * drafts if given is None or not drafts else min(given, 1.0 + drafts)

    def _bytes(self, rows: int, drafts: int, format: str, window: int) -> tuple[Moved, Moved]:
        """Of one row's step in one layer: stock, replayed."""
        ours = replayed_bytes(self.layer, format, window, 1 + drafts, self.accepted(drafts), rows)
        return stock_bytes(self.layer, STATE[self.options.state], 1 + drafts), ours

    def kernel(self, rows: int, drafts: int, format: str, window: int) -> tuple[float, float]:
        """Microseconds of one layer's step: stock, replayed."""
        stock, ours = self.bytes_of(rows, drafts, format, window)
        return (
            stock_us(self.times, self.layer, rows, stock),
            replayed_us(self.times, self.layer, rows, format, ours, 1 + drafts),
        )

    def speedup(self, rows: int, drafts: int, format: str, window: int) -> float:
        """Of one layer's step."""
        stock, ours = self.kernel(rows, drafts, format, window)
        return stock / ours

    @property
    def room(self) -> float:
        """Bytes of one GPU that are left beside the weights."""
        weights = _weights(self.model, self.options.bits) or 0.0
        return self.gpu.memory * 1e9 * USABLE - weights / self.options.tp

    def memory(self, drafts: int, format: str) -> Memory:
        """A request's state in both schemes."""
        options, layers = self.options, self.model.layers
        stock = layers * stock_memory(self.layer, STATE[options.state], drafts)
        ours = layers * replayed_memory(self.layer, format, options.window, drafts)
        kv = (self.model.kv_bytes or 0) / min(options.tp, self.model.kv_heads) * options.context
        fit = [max(0, int(self.room // (size + kv))) for size in (stock, ours)]
        return Memory(drafts, format, options.window, stock, ours, *fit)

    def rest(self, rows: int, drafts: int) -> tuple[float, float] | None:
        """The rest of a step in ms, at least and at most; None: unknown."""
        options = self.options
        if options.rest is not None:
            return options.rest, options.rest
        bandwidth = self.times.read
        work, kv = rest_ms(self.model, self.gpu, bandwidth, rows, 1 + drafts, options.context, options.tp, options.bits)
        return (REST[0] * work + kv, REST[1] * work + kv) if work else None

    def case(self, rows: int, drafts: int, format: str) -> Case:
        """A batch, with so many drafts, in a format."""
        layers, window = self.model.layers, self.options.window
        before, moved = self.bytes_of(rows, drafts, format, window)
        stock, ours = self.kernel(rows, drafts, format, window)
        old, new = (us * layers / 1e3 for us in (stock, ours))
        rest, room = self.rest(rows, drafts), self.memory(drafts, format)
        least, most = rest or (0.0, 0.0)
        return Case(
            batch=rows,
            drafts=drafts,
            format=format,
            window=window,
            accepted=self.accepted(drafts),
            stock_read=rows * layers * before.read,
            stock_written=rows * layers * before.written,
            read=rows * layers * moved.read,
            written=rows * layers * moved.written,
            stock_kernel_us=stock,
            kernel_us=ours,
            kernel_speedup=stock / ours,
            rest_ms=least,
            stock_step_ms=least + old,
            step_ms=least + new,
            step_speedup=(least + old) / (least + new) if rest else None,
            step_speedup_low=(most + old) / (most + new) if rest else None,
            stock_fits=room.stock_requests >= rows,
            fits=room.requests >= rows,
        )

    def advice(self, rows: int, drafts: int) -> Advice:
        """The fastest format and window."""
        windows = [window for window in WINDOWS if window > drafts] or [self.options.window]
        choices = {
            (format, window): self.speedup(rows, drafts, format, window)
            for format in self.options.formats
            for window in windows
        }
        # an fp32 state takes 4 bytes of what is kept, in one plane or several
        exact = [choice for choice in choices if element_bytes(choice[0], self.layer.geometry.K)[0] >= 4]
        best, best_exact = max(choices, key=choices.__getitem__), max(exact, key=choices.__getitem__, default=None)
        format, window = best_exact or (None, None)
        gain = choices[best_exact] if best_exact else None
        return Advice(rows, drafts, *best, choices[best], format, window, gain, self.times.windows)

    def pays(self, drafts: int, format: str) -> Pays:
        """From which batch on."""
        batches = range(1, MOST_ROWS + 1)
        slower = [rows for rows in batches if self.speedup(rows, drafts, format, self.options.window) <= 1]
        if not slower:
            return Pays(drafts, format, 1, None)
        return Pays(drafts, format, slower[-1] + 1 if slower[-1] < MOST_ROWS else None, slower[0])


def make(model: Model, of: Gpu, options: Options, table: dict[str, Any] | None = None) -> Plan:
    """A plan.

    Args:
        table: kernel times as `fit` makes them; None: those of the package.

    Raises:
        ValueError: an option that cannot be.
    """
    _check(options)
    maker = _Maker(model, of, options, table)
    kinds = [(drafts, format) for drafts in options.drafts for format in options.formats]
    sizes = [(drafts, rows) for drafts in options.drafts for rows in options.batches]
    return Plan(
        model,
        of,
        options,
        cases=[maker.case(rows, drafts, format) for drafts, rows in sizes for format in options.formats],
        memory=[maker.memory(*kind) for kind in kinds],
        advice=[maker.advice(rows, drafts) for drafts, rows in sizes],
        pays=[maker.pays(*kind) for kind in kinds],
        assumptions=_assumptions(model, of, options, maker.times, maker.room),
    )


def _check(options: Options) -> None:
    for name in options.formats:
        element_bytes(name, 1)
    if options.state not in STATE:
        raise checks.unknown("stock state", options.state, STATE)
    for name, values, least in (
        ("--batch", options.batches, 1),
        ("--drafts", options.drafts, 0),
        ("--window", (options.window,), 1),
        ("--context", (options.context,), 0),
        ("--weight-bits", (options.bits,), 1),
    ):
        if not values or min(values) < least:
            raise ValueError(
                f"{name} takes whole numbers, {least} or more; got {', '.join(map(str, values)) or 'none'}."
            )
    if options.accepted is not None and options.accepted < 1:
        raise ValueError(f"--accepted counts the committed tokens of a step, 1 or more; got {options.accepted:g}.")


def _weights(model: Model, bits: int) -> float | None:
    if model.weight_bytes is not None:
        return model.weight_bytes
    return None if model.size is None else model.size.total * bits / 8


def _assumptions(model: Model, of: Gpu, options: Options, known: Times, room: float) -> list[str]:
    weights = _weights(model, options.bits)
    if weights is None:
        said = "The model's size is unknown: no weights are counted, neither in memory nor in the step. Give --params."
    elif model.weight_bytes is not None:
        said = f"Weights: {weights / 1e9:,.1f} GB, the files beside the config."
    else:
        assert model.size is not None
        said = (
            f"Weights: {weights / 1e9:,.1f} GB at {options.bits} bits, {model.size.total / 1e9:g}e9 parameters"
            + (f", {model.size.active / 1e9:g}e9 of them per token" if model.size.active < model.size.total else "")
            + " (from the name or --params)."
        )
    if model.size and model.size.active < model.size.total and not model.experts:
        said += " How many experts there are is unknown: all weights are counted as read."
    rest = (
        "The rest of the step is the measured time that you gave (--rest-ms)."
        if options.rest is not None
        else "The rest of the step is at its limits (weights once at the read ceiling or products at the peak, keys "
        "and values once; no norms, sampling, launches): an engine takes more, so its speedup is given as a range, "
        f"from {REST[1]:g} times the limits of weights and products to the limits themselves. Seen once each with vLLM "
        "0.33 on one H200, batch 256, short contexts: about 2.7 times (Nemotron-3-Nano-4B) and 4 times (Qwen3.5-4B). "
        "Give --rest-ms for a single figure."
    )
    measured = sorted({name for c in known.replayed.values() for name in c.decode})
    guessed = [name for name in options.formats if name not in measured]
    lines = [
        f"Model: {model.name}, {model.confidence} ({model.source})." + (f" {model.note}." if model.note else ""),
        f"GPU: {of.name}, {of.memory:g} GB, {of.bandwidth:,.0f} GB/s nominal, {of.tflops:,.0f} dense 16-bit TFLOP/s "
        f"({of.source}); ceilings used: {known.read:,.0f} GB/s read, {known.copy:,.0f} GB/s read and written.",
        f"Kernel times: {known.origin}. Stock kernels: the fastest tuned public ones of those rows. At 32 rows and "
        f"more these times are within {known.error:.0%} of their rows: a speedup as near to 1 says nothing.",
        f"Measured rows have window {', '.join(map(str, known.windows))} and one token: others are extrapolated, by "
        "bytes and by records per fold, drafts by bytes, with the carry's measured cost once per token.",
        f"Stock: the state in {options.state}, read once a step and written once per token; with drafts 1 + drafts "
        "states per request, each with its convolution inputs, as engines keep them. Drafting costs both the same.",
        f"With d drafts a step commits {'1 + 0.6 d' if options.accepted is None else format(options.accepted, 'g')} "
        "tokens on average (--accepted). Activations, keys and values take 2 bytes.",
        said,
        rest,
        f"Memory: {USABLE:.0%} of the GPU's, less the weights, leaves {room / 1e9:,.1f} GB for requests of "
        f"{options.context:,} tokens"
        + (" (keys and values unknown, not counted)." if model.kv_bytes is None else ", keys and values counted.")
        + ("" if room > 0 else " The weights alone do not fit: raise --tp, or lower --weight-bits."),
        f"Tensor parallelism {options.tp}: heads are split, figures are per GPU, communication is not counted.",
    ]
    if guessed:
        lines.append(
            f"No measured rows for {', '.join(guessed)}: bytes at the slowest measured format's decoding cost."
        )
    own = known.replayed[model.recurrence].decode if model.recurrence in known.replayed else {}
    borrowed = [name for name in options.formats if name in measured and name not in own]
    if borrowed:
        lines.append(
            f"No measured rows for {', '.join(borrowed)} with {model.recurrence}: decoding costs what others' does."
        )
    return lines


# --- constants from rows ----------------------------------------------------------------------------------------------


def kernel_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that times are fitted to: plain decoding, flushes staggered; of one case the newest."""
    newest = {}
    for row in rows:
        if row["bench"] == "decode" and row["tokens"] == 1 and row["staggered"]:
            sizes = tuple(row["geometry"].values())
            newest[row["gpu"], row["recurrence"], sizes, row["format"], row["window"]] = row
    return list(newest.values())


def _measured(row: dict[str, Any]) -> tuple[Layer, int, Moved, Moved]:
    """A row's layer, rows, and bytes of both sides. Benches have a convolution of width 4."""
    sizes = dict(row["geometry"])
    rows = sizes.pop("B")
    layer = Layer(row["recurrence"], Geometry(**sizes), 4)
    element = 2 if "bf16 state" in row["baseline"] else 4
    return layer, rows, replayed_bytes(layer, row["format"], row["window"], rows=rows), stock_bytes(layer, element)


def predicted(of: Times, row: dict[str, Any]) -> tuple[float, float]:
    """Microseconds of a measured row, replayed and stock, as a plan would say."""
    layer, rows, ours, stock = _measured(row)
    return replayed_us(of, layer, rows, row["format"], ours), stock_us(of, layer, rows, stock)


def fit(rows: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """kernel_times.json: for every GPU and recurrence, the constants of Replayed and Stock that rows show.

    All are at least 0, and make the largest relative error smallest, that of fewer than 32 rows by half: a linear
    programme.

    Raises:
        ValueError: no row can be used.
    """
    rows = kernel_rows(rows)
    if not rows:
        raise ValueError("no rows to fit: rows of `replayssm bench kernels` are needed (plain decoding, staggered).")
    table: dict[str, Any] = {}
    for device in dict.fromkeys(row["gpu"] for row in rows):
        here = [row for row in rows if row["gpu"] == device]
        read, copy = (
            sorted(row["ceilings"][name] for row in here)[len(here) // 2] for name in ("read_gbps", "copy_gbps")
        )
        entry: dict[str, Any] = {"rows": len(here), "read_gbps": read, "copy_gbps": copy}
        entry |= {"windows": sorted({row["window"] for row in here}), "replayed": {}, "stock": {}}
        for recurrence in sorted({row["recurrence"] for row in here}):
            some = [row for row in here if row["recurrence"] == recurrence]
            names = sorted({row["format"] for row in some})
            ours, stock = [], []
            for row in some:
                layer, count, moved, before = _measured(row)
                *factors, elements = _beyond(layer, count, moved, 1)
                chosen = [elements if row["format"] == name else 0.0 for name in names]
                weight = 1.0 if count >= 32 else 0.5
                ours.append((row["us"], count * moved.total / read / 1e3, [*factors, *chosen], weight))
                sizes = [count * size / 1e6 for size in (before.total - before.beside, before.beside)]
                stock.append((row["baseline_us"], count * before.total / copy / 1e3, [1.0, *sizes], weight))
            launch, apart, carry, flush, wait, *decode = _smallest_error(ours)
            entry["replayed"][recurrence] = Replayed(
                launch, apart, carry, flush, wait, dict(zip(names, decode, strict=True))
            )._asdict()
            entry["stock"][recurrence] = Stock(*_smallest_error(stock))._asdict()
        table[device] = entry
    made = {
        "note": "What measured kernels take beyond their bytes at the memory's ceiling; units in "
        "replayssm.plan.Replayed and Stock. Made from rows by the command; not edited by hand.",
        "command": command,
        "gpus": table,
    }
    by_device = {known.device: known for known in gpus().values()}
    for device, entry in table.items():
        if device not in by_device:
            raise ValueError(f"{device} has no entry in gpus.json: add its nominal figures first.")
        of = times(by_device[device], made)
        errors = [
            (row["geometry"]["B"], *(abs(new / old - 1) for new, old in zip(predicted(of, row), measured, strict=True)))
            for row in rows
            if row["gpu"] == device
            for measured in [(row["us"], row["baseline_us"])]
        ]
        entry["largest_error"] = {
            name: {
                side: round(max((error[i] for error in errors if error[0] >= least), default=0.0), 4)
                for i, side in ((1, "replayed"), (2, "stock"))
            }
            for name, least in (("B >= 32", 32), ("any B", 1))
        }
    return made


def _smallest_error(samples: list[tuple[float, float, list[float], float]]) -> list[float]:
    """Constants c >= 0 by which least + factors . c comes nearest to the measured, in relative error times a weight.

    The largest error counts, and a little the mean one, which decides where several would do.
    """
    import numpy as np
    from scipy.optimize import linprog

    measured, least, factors, weight = (np.array(column) for column in zip(*samples, strict=True))
    A, b = factors * (weight / measured)[:, None], weight * (1 - least / measured)
    n, m = A.shape
    # unknowns: c, the errors of every sample, the largest one
    cost = np.concatenate([np.zeros(m), np.full(n, 0.1 / n), [1.0]])
    one, none = np.eye(n), np.zeros((n, 1))
    above = np.hstack([A, -one, none])  # A c - b <= error
    below = np.hstack([-A, -one, none])  # b - A c <= error
    under = np.hstack([np.zeros((n, m)), one, -np.ones((n, 1))])  # error <= largest
    found = linprog(cost, np.vstack([above, below, under]), np.concatenate([b, -b, np.zeros(n)]))
    if not found.success:
        raise ValueError(f"the constants could not be fitted: {found.message}.")
    return [round(float(x), 6) for x in found.x[:m]]

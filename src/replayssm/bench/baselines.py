"""Public kernels that the GPU benchmark compares with: decode steps with their own convolution update.

A step covers what decode_layer covers: convolution and silu, gates, norms and scale of q and k, state update, output,
skip. No output gate, no norm of y. It runs the library's own code on buffers that stay between calls, so it can be
captured in a CUDA graph. The only things set from outside are launch choices (tile, warps): the fastest of a grid,
timed in CUDA graphs over all layers; the library's own choice is among them.

Of several tokens (drafts) an engine keeps a state per token: slots [B, T], the state after token i in the i-th, and the
next step begins from the one that the number of accepted tokens chooses. Convolution windows are T - 1 inputs longer.

Dtypes: activations and convolution weights in the inputs' dtype (as the libraries keep them), other parameters fp32.
Lost against the libraries whole: their paging of states (here slots lie side by side).

Importing this module needs neither library; `build` needs the one that its kind names.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from importlib.metadata import version
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.bench import replay
from replayssm.recurrences import Geometry
from replayssm.testing import LayerInputs

Launch = dict[str, int]  # named launch choices; empty: the library's own


class Step(NamedTuple):
    """One decode step of a stack of layers that share inputs and weights; every layer has its own states.

    Attributes:
        name: what runs, with versions.
        launch: the launch choices in force.
        run: one step of a layer, y [B, H, V] (drafts: [B, T, H, V]) in the activation dtype; valid until the next call.
        state: the present state of a layer, [B, H, V, K] in fp32; of drafts, after the accepted ones.
        answer: what run returns where the recurrence's outputs are y: y itself, or gated and normalised.
        nbytes: what a request holds in a layer.
    """

    name: str
    launch: Launch
    run: Callable[[int], Tensor]
    state: Callable[[int], Tensor]
    answer: Callable[[Tensor], Tensor]
    nbytes: int


class Timing(NamedTuple):
    """Launch choices and their median microseconds per layer."""

    launch: Launch
    us: float


class _Layers(NamedTuple):
    """A stack of layers before its launch is chosen."""

    run: Callable[[int], Tensor]
    state: Callable[[int], Tensor]
    reset: Callable[[], None]
    nbytes: int
    answer: Callable[[Tensor], Tensor] = lambda y: y


class _Kind(NamedTuple):
    """One public kernel.

    Attributes:
        recurrence: whose step it is.
        package: the distribution that holds it.
        text: its functions.
        make: (geometry, batch, layers, state_dtype, inputs, weights) -> its layers, all states zero; of drafts, with
            `accepted` as well.
        kernel: module and name of the Triton kernel of the recurrence.
        own: the launch where nothing is tuned.
        search: grids to walk one after the other, each from the best of the one before; all hold the own choices.
        drafts: for several tokens.
        tiles: the axis of the kernel's grid that holds tiles of V.
    """

    recurrence: str
    package: str
    text: str
    make: Callable[..., _Layers]
    kernel: tuple[str, str]
    own: Launch
    search: tuple[list[Launch], ...]
    drafts: bool = False
    tiles: int = 0


def kinds(recurrence: str, drafts: bool = False) -> list[str]:
    """Names of the public kernels of a recurrence, for one token or for drafts."""
    return [name for name, kind in _KINDS.items() if kind.recurrence == recurrence and kind.drafts == drafts]


def build(
    kind: str,
    geometry: Geometry,
    batch: int,
    layers: int,
    state_dtype: torch.dtype,
    inputs: LayerInputs,
    weights: Any,
    launch: Launch | None = None,
    accepted: Tensor | None = None,
) -> Step:
    """A step of a public kernel, all states and convolution windows zero.

    Args:
        inputs: of one token (T = 1) or of drafts, on the GPU, shared by all layers; read anew at every call.
        weights: the recurrence's own NamedTuple, on the GPU, shared by all layers.
        accepted: int32 [B], for drafts: how many tokens of the step before count, 1 to T (1 before the first step);
            read anew at every call.
        launch: choices to use instead of searching. A search is made once per kind, sizes and state dtype.

    Raises:
        ValueError: the kernel cannot run such a layer.
    """
    if launch is None:
        sizes = (kind, geometry, batch, inputs.x.shape[1], state_dtype)
        if sizes not in _FOUND:
            _FOUND[sizes] = tune(
                kind, geometry, batch, layers, state_dtype, inputs, weights, accepted=accepted
            )[0].launch  # fmt: skip
        launch = _FOUND[sizes]
    record, more = _KINDS[kind], {} if accepted is None else {"accepted": accepted}
    stack = record.make(geometry, batch, layers, state_dtype, inputs, weights, **more)
    width = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[state_dtype]
    name = f"{record.package} {version(record.package)} {record.text}, {width} state"
    run = _with_launch(record, stack.run, launch)
    return Step(name, launch, run, stack.state, stack.answer, stack.nbytes // batch)


def tune(
    kind: str,
    geometry: Geometry,
    batch: int,
    layers: int,
    state_dtype: torch.dtype,
    inputs: LayerInputs,
    weights: Any,
    replays: int = 15,
    accepted: Tensor | None = None,
) -> list[Timing]:
    """Times of all launches in a kind's grids: the last grid's first, fastest first; the library's own launch last.

    `layers` states should be far larger than the L2.
    """
    record, more = _KINDS[kind], {} if accepted is None else {"accepted": accepted}
    stack = record.make(geometry, batch, layers, state_dtype, inputs, weights, **more)

    def timing(launch: Launch) -> Timing:
        stack.reset()
        return Timing(launch, microseconds(_with_launch(record, stack.run, launch), layers, replays))

    base = record.own
    timing(base)  # what runs first in a process runs slower
    times = [timing(base)]
    for grid in record.search:
        found = sorted((timing(base | choice) for choice in grid), key=lambda entry: entry.us)
        base, times = found[0].launch, found + times
    return times


def microseconds(
    run: Callable[[int], Any], layers: int, replays: int = 15, before: Callable[[], None] | None = None
) -> float:
    """Median microseconds per layer of one step of all layers, in a CUDA graph; `before` as in bench.replay."""

    def step() -> None:
        for layer in range(layers):
            run(layer)

    return median(replay(step, 3, replays, before)) / layers


_FOUND: dict[tuple[str, Geometry, int, int, torch.dtype], Launch] = {}


def _with_launch(kind: _Kind, run: Callable[[int], Tensor], launch: Launch) -> Callable[[int], Tensor]:
    def forced(layer: int) -> Tensor:
        with torch.no_grad(), _forced(kind, launch):
            return run(layer)

    return forced


def _refuse(kind: str, needed: str, got: Any) -> ValueError:
    return ValueError(f"{kind}: needs {needed}; got {got}.")


# ---- vLLM: states [layers, slots, H, V, K], slot 0 is its null block ----

_SSM = "vllm.model_executor.layers.mamba.ops.mamba_ssm"
_CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
_GDN = "vllm.third_party.flash_linear_attention.ops.fused_recurrent"
_GDN_DRAFTS = "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating"
_OPS = "vllm._custom_ops"
_KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent"


class _Vllm:
    """Slots, states and the convolution, which all of its layers have alike.

    Tokens of all rows lie one behind the other: [N, ...], N = B, of drafts B T.
    """

    def __init__(
        self, geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any,
        accepted: Tensor | None = None,
    ) -> None:  # fmt: skip
        H, _, V, K = geometry
        T = inputs.x.shape[1]
        x = self.x = inputs.x.flatten(0, 1)
        slots = torch.arange(1, batch * T + 1, device=x.device, dtype=torch.int32)
        self.accepted, self.slots = accepted, slots if accepted is None else slots.view(batch, T)
        self.starts = torch.arange(0, batch * T + 1, T, device=x.device, dtype=torch.int32)
        self.states = x.new_zeros(layers, batch * T + 1, H, V, K, dtype=dtype)
        C, W = weights.conv_weight.shape
        self.windows = x.new_zeros(layers, batch * T + 1, W - 1 + T - 1, C)
        self.weight = weights.conv_weight.to(x.dtype)
        self.bias = None if weights.conv_bias is None else weights.conv_bias.to(x.dtype)
        self.convolved = torch.empty_like(x)
        self.y = x.new_empty(batch * T, H, V)
        self.update = import_module(_CONV).causal_conv1d_update
        self.drafts: dict[str, Any] = {}
        if accepted is not None:
            self.drafts = {"num_accepted_tokens": accepted, "query_start_loc": self.starts, "max_query_len": T}

    def convolve(self, layer: int) -> None:
        """x through the layer's window into `convolved` [N, C]. The engine overwrites x instead."""
        window = self.windows[layer].transpose(1, 2)
        slots = self.slots if self.slots.ndim == 1 else self.slots[:, 0]
        self.update(
            self.x, window, self.weight, self.bias, "silu", conv_state_indices=slots, out=self.convolved, **self.drafts
        )  # fmt: skip

    def state(self, layer: int) -> Tensor:
        """[B, H, V, K] in fp32, after the accepted tokens."""
        if self.accepted is None:
            return self.states[layer, 1:].float()
        at = self.slots.gather(1, self.accepted[:, None].long() - 1)[:, 0]
        return self.states[layer, at.long()].float()

    def layers(
        self, decode: Callable[[Tensor], Any], answer: Callable[[Tensor], Tensor] = lambda y: y
    ) -> _Layers:  # fmt: skip
        """The whole step, from what runs behind the convolution on the states of one layer [slots, H, V, K]."""

        def run(layer: int) -> Tensor:
            self.convolve(layer)
            decode(self.states[layer])
            return self.y if self.accepted is None else self.y.unflatten(0, tuple(self.slots.shape))

        def reset() -> None:
            self.states.zero_()
            self.windows.zero_()

        held = sum(pool[0, 1:].nbytes for pool in (self.states, self.windows))
        return _Layers(run, self.state, reset, held, answer)


def _vllm_mamba2(
    geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any,
    accepted: Tensor | None = None,
) -> _Layers:  # fmt: skip
    if weights.D is None or weights.dt_bias is None or weights.dt_limit != (0.0, float("inf")):
        raise _refuse("vllm_mamba2", "D, dt_bias and an open dt_limit", weights)
    (H, G, V, K), common = geometry, _Vllm(geometry, batch, layers, dtype, inputs, weights, accepted)
    update = import_module(_SSM).selective_state_update
    v, k, q = common.convolved.split([H * V, G * K, G * K], -1)
    v, k, q = v.unflatten(-1, (H, V)), k.unflatten(-1, (G, K)), q.unflatten(-1, (G, K))
    A = (-weights.A_log.float().exp())[:, None, None].expand(H, V, K)
    D = weights.D.float() if weights.D.ndim == 2 else weights.D.float()[:, None].expand(H, V)
    dt = inputs.raw_w.flatten(0, 1)[:, :, None].expand(len(v), H, V)
    dt_bias = weights.dt_bias.float()[:, None].expand(H, V)
    drafts = {} if accepted is None else {"num_accepted_tokens": accepted, "cu_seqlens": common.starts}

    def decode(state: Tensor) -> None:
        update(
            state, v, dt, A, k, q, D, dt_bias, dt_softplus=True, state_batch_indices=common.slots,
            dst_state_batch_indices=common.slots, out=common.y, **drafts,
        )  # fmt: skip

    return common.layers(decode)


def _vllm_gdn(
    geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any
) -> _Layers:
    if weights.beta_scale != 1.0 or inputs.raw_g is None:
        raise _refuse("vllm_gdn", "beta_scale 1.0 and raw_g", weights.beta_scale)
    common = _Vllm(geometry, batch, layers, dtype, inputs, weights)
    packed = import_module(_GDN).fused_recurrent_gated_delta_rule_packed_decode
    a, b, A_log, dt_bias = inputs.raw_g[:, 0], inputs.raw_w[:, 0], weights.A_log.float(), weights.dt_bias.float()

    def decode(state: Tensor) -> None:
        packed(
            common.convolved, a, b, A_log, dt_bias, geometry.K**-0.5, state, common.y[:, None], common.slots,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return common.layers(decode)


def _vllm_gdn_drafts(
    geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any,
    accepted: Tensor | None = None,
) -> _Layers:  # fmt: skip
    """As QwenGatedDeltaNetAttention._forward_core: q, k and v are copied apart, outputs into the layer's buffer."""
    if weights.beta_scale != 1.0 or inputs.raw_g is None:
        raise _refuse("vllm_gdn_drafts", "beta_scale 1.0 and raw_g", weights.beta_scale)
    (H, G, V, K), common = geometry, _Vllm(geometry, batch, layers, dtype, inputs, weights, accepted)
    update = import_module(_GDN_DRAFTS).fused_sigmoid_gating_delta_rule_update
    a, b = inputs.raw_g.flatten(0, 1), inputs.raw_w.flatten(0, 1)
    A_log, dt_bias = weights.A_log.float(), weights.dt_bias.to(inputs.x.dtype)
    sizes = [G * K, G * K, H * V]

    def decode(state: Tensor) -> None:
        parts = common.convolved.split(sizes, -1)
        flat = torch.cat([part.reshape(-1) for part in parts]).split([len(a) * size for size in sizes])
        q, k, v = (part.view(1, len(a), -1, dim) for part, dim in zip(flat, (K, K, V), strict=True))
        y, _ = update(
            A_log=A_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, initial_state=state, inplace_final_state=True,
            cu_seqlens=common.starts, ssm_state_indices=common.slots, num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        common.y[:] = y.squeeze(0)

    return common.layers(decode)


def _vllm_gdn_drafts_cuda(
    geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any,
    accepted: Tensor | None = None,
) -> _Layers:  # fmt: skip
    """As _forward_core_decode_spec_fused_norm: the CUDA kernel, which gates and normalises outputs as well."""
    (H, G, V, K), x, tokens = geometry, inputs.x, inputs.x.shape[1]
    needed = "beta_scale 1.0, raw_g, bf16 activations, K = V = 128, H / G in 1 2 3 4 8, at most 8 tokens, no fp16 state"
    fits = weights.beta_scale == 1.0 and inputs.raw_g is not None and x.dtype == torch.bfloat16 and tokens <= 8
    if not (fits and K == V == 128 and H // G in (1, 2, 3, 4, 8) and dtype in (torch.float32, torch.bfloat16)):
        raise _refuse("vllm_gdn_drafts_cuda", needed, (geometry, tokens, dtype))
    assert inputs.raw_g is not None
    common, ops = _Vllm(geometry, batch, layers, dtype, inputs, weights, accepted), import_module(_OPS)
    if not hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
        raise _refuse("vllm_gdn_drafts_cuda", "vLLM's compiled extension", "none that has this kernel")
    a, b = inputs.raw_g.flatten(0, 1), inputs.raw_w.flatten(0, 1)
    A_log, dt_bias = weights.A_log.float(), weights.dt_bias.to(x.dtype)
    gate, norm = torch.ones_like(common.y), x.new_ones(V)

    def decode(state: Tensor) -> None:
        ops.fused_gdn_decode_post_conv_mtp(
            mixed_qkv=common.convolved, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state_indices=common.slots,
            cu_seqlens=common.starts, num_accepted_tokens=accepted, state=state, output_gate=gate, norm_weight=norm,
            out=common.y, scale=K**-0.5, norm_eps=1e-6, output_gate_activation="silu",
        )  # fmt: skip

    def answer(y: Tensor) -> Tensor:
        one = y.new_ones(())
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * one * torch.sigmoid(one)

    return common.layers(decode, answer)


def _vllm_kda(
    geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any
) -> _Layers:
    if weights.beta_scale != 1.0 or inputs.raw_g is None or geometry.G != geometry.H:
        raise _refuse("vllm_kda", "beta_scale 1.0, raw_g and G = H", (weights.beta_scale, geometry))
    common = _Vllm(geometry, batch, layers, dtype, inputs, weights)
    packed = import_module(_KDA).fused_recurrent_kda_packed_decode
    g, b = inputs.raw_g.transpose(0, 1), inputs.raw_w.transpose(0, 1)  # [1, B, H, K], [1, B, H]
    A_log, dt_bias = weights.A_log.float(), weights.dt_bias.float().reshape(-1)

    def decode(state: Tensor) -> None:
        packed(
            common.convolved, g, b, A_log, dt_bias, weights.lower_bound, state, common.slots, geometry.K**-0.5,
            out=common.y[None],
        )  # fmt: skip

    return common.layers(decode)


# ---- flash-linear-attention: as its layers call it (three convolutions, raw gates, states [B, H, V, K]) ----

_FLA_CONV = "fla.modules.causal_conv1d.ops"
_FLA_GDN = "fla.ops.gated_delta_rule.fused_recurrent"
_FLA_KDA = "fla.ops.kda.fused_recurrent"


class _Fla:
    """Convolutions, raw gates and states, which both of its layers have alike."""

    def __init__(
        self, geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any
    ) -> None:
        H, G, V, K = geometry
        self.parts = inputs.x.split([G * K, G * K, H * V], -1)
        self.heads = ((G, K), (G, K), (H, V))
        sizes, cast = [part.shape[-1] for part in self.parts], inputs.x.dtype
        W = weights.conv_weight.shape[1]
        self.windows = [[inputs.x.new_zeros(batch, size, W) for size in sizes] for _ in range(layers)]
        self.weight = [part.to(cast).contiguous() for part in weights.conv_weight.split(sizes)]
        bias = weights.conv_bias
        self.bias = [None] * 3 if bias is None else [part.to(cast).contiguous() for part in bias.split(sizes)]
        self.update = import_module(_FLA_CONV).causal_conv1d_update
        self.first = inputs.x.new_zeros(layers, batch, H, V, K, dtype=dtype)
        self.states = list(self.first)
        self.captured: list[Tensor] = []
        self.arguments: dict[str, Any] = {
            "g": inputs.raw_g,
            "beta": inputs.raw_w,
            "A_log": weights.A_log.float(),
            "dt_bias": weights.dt_bias.float().reshape(-1),
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": weights.beta_scale == 2.0,
            "use_gate_in_kernel": True,
            "output_final_state": True,
            "state_v_first": True,
        }
        if weights.beta_scale not in (1.0, 2.0):
            raise _refuse("fla", "beta_scale 1.0 or 2.0", weights.beta_scale)

    def convolve(self, layer: int) -> list[Tensor]:
        """q, k [B, 1, G, K] and v [B, 1, H, V]."""
        return [
            self.update(x, window, None, weight, bias, "silu")[0].unflatten(-1, head)
            for x, window, weight, bias, head in zip(
                self.parts, self.windows[layer], self.weight, self.bias, self.heads, strict=True
            )
        ]

    def layers(self, decode: Callable[..., tuple[Tensor, Tensor]]) -> _Layers:
        """The whole step. A captured step reads the state of its capture at every replay, where states are new."""

        def run(layer: int) -> Tensor:
            q, k, v = self.convolve(layer)
            before = self.states[layer]
            if torch.cuda.is_current_stream_capturing():
                self.captured.append(before)
            y, self.states[layer] = decode(q=q, k=k, v=v, initial_state=before, **self.arguments)
            return y[:, 0]

        def reset() -> None:
            self.captured.clear()
            self.states[:] = list(self.first.zero_())
            for windows in self.windows:
                for window in windows:
                    window.zero_()

        held = self.first[0].nbytes + sum(window.nbytes for window in self.windows[0])
        return _Layers(run, lambda layer: self.states[layer].float(), reset, held)


def _fla_gdn(
    geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any
) -> _Layers:
    if dtype != torch.float32:
        raise _refuse("fla_gdn", "fp32 states, which it always returns", dtype)
    common = _Fla(geometry, batch, layers, dtype, inputs, weights)
    return common.layers(import_module(_FLA_GDN).fused_recurrent_gated_delta_rule)


def _fla_kda(
    geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any
) -> _Layers:
    if dtype != torch.float32:
        raise _refuse("fla_kda", "fp32 states, which it always returns", dtype)
    common = _Fla(geometry, batch, layers, dtype, inputs, weights)
    common.arguments["lower_bound"] = weights.lower_bound
    return common.layers(import_module(_FLA_KDA).fused_recurrent_kda)


def _fla_kda_in_place(
    geometry: Geometry, batch: int, layers: int, dtype: torch.dtype, inputs: LayerInputs, weights: Any
) -> _Layers:
    common = _Fla(geometry, batch, layers, dtype, inputs, weights)
    y = inputs.x.new_empty(batch, 1, geometry.H, geometry.V)
    common.arguments |= {"lower_bound": weights.lower_bound, "inplace_final_state": True, "out": y}
    return common.layers(import_module(_FLA_KDA).fused_recurrent_kda_fwd)


# ---- launch choices ----


@contextmanager
def _forced(kind: _Kind, launch: Launch) -> Iterator[None]:
    """Kernels start with these choices, whatever their callers ask for."""
    with ExitStack() as stack:
        if "BLOCK_SIZE_M" in launch:
            config = (launch["BLOCK_SIZE_M"], launch["num_warps"])
            stack.enter_context(import_module(_SSM).override_ssm_config(config))
        if "BV" in launch:
            choices = {"BV": launch["BV"], "num_warps": launch["num_warps"]}
            stack.enter_context(_relaunched(*kind.kernel, choices, kind.tiles))
        if "conv_BLOCK_N" in launch:
            choices = {"BLOCK_N": launch["conv_BLOCK_N"], "num_warps": launch["conv_num_warps"]}
            stack.enter_context(_relaunched(_CONV, "_causal_conv1d_update_kernel", choices))
        if "conv_BD" in launch:
            only = import_module("triton").Config({"BD": launch["conv_BD"]}, num_warps=launch["conv_num_warps"])
            tuner = import_module(_FLA_CONV).causal_conv1d_update_kernel.fn
            stack.enter_context(_attribute(tuner, "configs", [only]))
        yield


class _Relaunched:
    """A Triton kernel in front of its caller: own choices in place of the caller's, the grid counted anew."""

    def __init__(self, kernel: Any, choices: Launch, axis: int) -> None:
        self.kernel, self.choices, self.axis = kernel, choices, axis

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def start(*arguments: Any, **named: Any) -> Any:
            whole = grid
            if "BV" in self.choices:  # tiles of V are (part of) an axis
                tiles, ours = (-(-named["V"] // BV) for BV in (named["BV"], self.choices["BV"]))
                whole = (*grid[: self.axis], grid[self.axis] // tiles * ours, *grid[self.axis + 1 :])
            return self.kernel[whole](*arguments, **named | self.choices)

        return start


def _relaunched(module: str, name: str, choices: Launch, axis: int = 0) -> AbstractContextManager[None]:
    owner = import_module(module)
    return _attribute(owner, name, _Relaunched(getattr(owner, name), choices, axis))


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


_MAMBA2_GRID: list[Launch] = [
    {"BLOCK_SIZE_M": rows, "num_warps": warps} for rows, warps in product((4, 8, 16, 32, 64), (1, 2, 4, 8))
]
# 4 to 128 registers a thread for a tile of K = 128
_DELTA_GRID: list[Launch] = [
    {"BV": BV, "num_warps": warps}
    for BV, warps in product((4, 8, 16, 32, 64, 128), (1, 2, 4, 8))
    if 1 <= BV // warps <= 32
]
_CONV_GRID: list[Launch] = [
    {"conv_BLOCK_N": channels, "conv_num_warps": warps}
    for channels, warps in product((64, 128, 256, 512, 1024), (1, 2, 4, 8))
    if 64 <= channels // warps <= 256
]
# Its own autotuner's set, cut down; without a choice it would tune by itself, once for all batches.
_FLA_CONV_GRID: list[Launch] = [
    {"conv_BD": BD, "conv_num_warps": warps} for BD, warps in ((32, 4), (64, 4), (128, 4), (256, 4), (256, 8))
]
_FLA_OWN: Launch = {"conv_BD": 128, "conv_num_warps": 4}

_KINDS: dict[str, _Kind] = {
    "vllm_mamba2": _Kind(
        "mamba2",
        "vllm",
        "causal_conv1d_update + selective_state_update",
        _vllm_mamba2,
        (_SSM, "_selective_scan_update_kernel"),
        {},
        (_MAMBA2_GRID, _CONV_GRID),
    ),
    "vllm_gdn": _Kind(
        "gdn",
        "vllm",
        "causal_conv1d_update + fused_recurrent_gated_delta_rule_packed_decode",
        _vllm_gdn,
        (_GDN, "fused_recurrent_gated_delta_rule_packed_decode_kernel"),
        {},
        (_DELTA_GRID, _CONV_GRID),
    ),
    "vllm_mamba2_drafts": _Kind(
        "mamba2",
        "vllm",
        "causal_conv1d_update + selective_state_update (num_accepted_tokens)",
        _vllm_mamba2,
        (_SSM, "_selective_scan_update_kernel"),
        {},
        (_MAMBA2_GRID, _CONV_GRID),
        drafts=True,
    ),
    "vllm_gdn_drafts": _Kind(
        "gdn",
        "vllm",
        "causal_conv1d_update + fused_sigmoid_gating_delta_rule_update (num_accepted_tokens)",
        _vllm_gdn_drafts,
        (_GDN_DRAFTS, "fused_sigmoid_gating_delta_rule_update_kernel"),
        {},
        (_DELTA_GRID, _CONV_GRID),
        drafts=True,
        tiles=1,
    ),
    "vllm_gdn_drafts_cuda": _Kind(
        "gdn",
        "vllm",
        "causal_conv1d_update + fused_gdn_decode_post_conv_mtp (norm and output gate in it)",
        _vllm_gdn_drafts_cuda,
        (_GDN_DRAFTS, "fused_sigmoid_gating_delta_rule_update_kernel"),
        {},
        (_CONV_GRID,),
        drafts=True,
    ),
    "fla_gdn": _Kind(
        "gdn",
        "fla-core",
        "3 causal_conv1d_update + fused_recurrent_gated_delta_rule (state out is a new tensor)",
        _fla_gdn,
        (_FLA_GDN, "fused_recurrent_gated_delta_rule_fwd_kernel"),
        _FLA_OWN,
        (_FLA_CONV_GRID, _DELTA_GRID),
    ),
    "vllm_kda": _Kind(
        "kda",
        "vllm",
        "causal_conv1d_update + fused_recurrent_kda_packed_decode",
        _vllm_kda,
        (_KDA, "fused_recurrent_kda_packed_decode_kernel"),
        {},
        (_DELTA_GRID, _CONV_GRID),
    ),
    "fla_kda": _Kind(
        "kda",
        "fla-core",
        "3 causal_conv1d_update + fused_recurrent_kda (state out is a new tensor)",
        _fla_kda,
        (_FLA_KDA, "fused_recurrent_kda_fwd_kernel"),
        _FLA_OWN,
        (_FLA_CONV_GRID, _DELTA_GRID),
    ),
    "fla_kda_in_place": _Kind(
        "kda",
        "fla-core",
        "3 causal_conv1d_update + fused_recurrent_kda_fwd (state in place)",
        _fla_kda_in_place,
        (_FLA_KDA, "fused_recurrent_kda_fwd_kernel"),
        _FLA_OWN,
        (_FLA_CONV_GRID, _DELTA_GRID),
    ),
}

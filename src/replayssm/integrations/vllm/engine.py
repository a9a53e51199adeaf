"""vLLM 0.33: its layers, metadata builders and pages. What depends on the version is in this file alone.

A layer that we take over keeps everything of its own but the state: `get_kv_cache_spec` asks for our page,
`bind_kv_cache` takes it, `get_attn_backend` brings our builder, and the method between its projections sends decode
rows to the Pool. Prefill rows run vLLM's own kernels, on states that the Pool hands out and takes back.
"""

import functools
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend, Mamba2AttentionMetadataBuilder
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec
from vllm.version import __version__

from replayssm import ConvGeometry, Geometry, page_bytes
from replayssm.integrations.vllm import rows as host
from replayssm.integrations.vllm.pool import Layer, Pool, Rows
from replayssm.integrations.vllm.settings import Settings, parse, refusals
from replayssm.recurrences import gdn, kda, mamba2

logger = init_logger(f"vllm.{__name__}")


# ---- a step's rows ----


@dataclass
class Metadata:
    """One step of a group of layers.

    Attributes:
        rows: the decode rows, or None.
        prefill: vLLM's own metadata of the prefill rows alone, whose states lie at 1, 2, ...; or None.
        prefill_tokens: their tokens in the step, a slice or indices.
        prefill_slots, prefill_accepted: int64, block of every such row, and what counts of what it may have pending.
        anew: none of them has a state yet.
        fresh: rows of the block table whose slot is reset for this step.
        decode_rows, prefill_rows: both kinds' rows of the block table.
    """

    pool: Pool
    rows: Rows | None
    prefill: Any
    prefill_tokens: Any
    prefill_slots: Tensor | None
    prefill_accepted: Tensor | None
    anew: bool
    fresh: Tensor | None
    decode_rows: Tensor | slice
    prefill_rows: Tensor | None


class _Builder:
    """Mixed into vLLM's own builders, which make the prefill rows' metadata."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.most = 1 + vllm_config.num_speculative_tokens
        rows = vllm_config.scheduler_config.max_num_seqs
        self.slots, self.lengths = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self.accepted = torch.full((rows,), self.most, dtype=torch.int64, device=device)
        self.names = sorted(layer_names, key=_order)
        self.context = vllm_config.compilation_config.static_forward_context
        self.pool_: Pool | None = None
        self.supports_update_block_table = bool(vllm_config.use_v2_model_runner)

    @property
    def pool(self) -> Pool:
        """Made when the pages are there, and again when they have moved."""
        layers = [self.context[name] for name in self.names]
        pages = [layer.kv_cache[0] for layer in layers]
        same = self.pool_ is not None and all(
            a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in zip(self.pool_.pages, pages, strict=True)
        )
        if not same:
            self.pool_ = Pool([layer.replay_layer() for layer in layers], layers[0].replay.settings, self.most)
            for i, layer in enumerate(layers):
                layer.replay.index = i
        assert self.pool_ is not None
        return self.pool_

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Metadata:
        """Decode rows only: as many tokens each as the graph is for."""
        drafts = torch.diff(common_attn_metadata.query_start_loc_cpu) - 1
        running = common_attn_metadata.replace(is_prefilling=None)
        return self.build(0, running, num_decode_draft_tokens_cpu=drafts if self.most > 1 else None)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> Metadata:
        """Rows of a step. What a CUDA graph reads lies in tensors of this builder."""
        m, pool = common_attn_metadata, self.pool
        starts = m.query_start_loc_cpu[: m.num_reqs + 1].numpy().astype(np.int64)
        lengths = np.diff(starts)
        before = m.seq_lens_cpu_upper_bound[: m.num_reqs].numpy() - lengths
        drafts = num_decode_draft_tokens_cpu
        drafted = None if drafts is None else drafts[: m.num_reqs].numpy().astype(np.int64)
        beginning = np.zeros(m.num_reqs, np.bool_)
        if m.is_prefilling is not None:
            # a prompt of one token with placeholders for drafts is no prefill (_placeholders_are_drafts)
            beginning = m.is_prefilling[: m.num_reqs].numpy() | (drafted is not None and drafted > 0)
        split = host.split(starts, beginning & (before <= 0), drafted, self.most)
        device, rows, count = m.block_table_tensor.device, None, len(split.decodes)
        if split.dense:
            count = min(count, m.num_actual_tokens // split.tokens)
        leading = bool((split.decodes == np.arange(len(split.decodes))).all())
        decode_rows: Any = slice(0, count) if leading else _upload(split.decodes, device)
        if count:
            self.slots[:count].copy_(m.block_table_tensor[decode_rows, 0])
            self.lengths[:count].copy_(torch.diff(m.query_start_loc[: m.num_reqs + 1])[decode_rows])
            if num_accepted_tokens is None:
                if self.most > 1:
                    self.accepted.fill_(self.most)
            else:
                # a row's first token was sampled, or is of the prompt: it counts whatever the engine says
                self.accepted[:count].copy_(num_accepted_tokens[decode_rows].clamp(min=1))
            parts = () if split.dense else host.ragged(starts, split.decodes, split.tokens)
            rows = Rows(
                split.tokens, self.slots[:count], self.lengths[:count], self.accepted[:count],
                *(_upload(part, device) for part in parts),
            )  # fmt: skip
        taken = split.prefill_tokens
        tokens = taken if isinstance(taken, slice) or not len(taken) else _upload(taken, device)
        made = Metadata(pool, rows, None, tokens, None, None, False, None, decode_rows, None)
        if len(split.fresh):
            made.fresh = _upload(split.fresh, device)
        if len(split.prefills):
            made.prefill_rows = _upload(split.prefills, device)
            made.anew = bool((before[split.prefills] <= 0).all())
            made.prefill = super().build(0, _only(m, split.prefills, made.prefill_rows, lengths))  # type: ignore[misc]
            n = len(split.prefills)
            made.prefill_accepted = (
                torch.full((n,), self.most, device=device)
                if num_accepted_tokens is None
                else num_accepted_tokens[made.prefill_rows].clamp(min=1).to(torch.int64)
            )
        return self._on(made, m.block_table_tensor)

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        """The same step for another group of layers, whose blocks are others."""
        rows = metadata.rows
        if rows is not None:
            count = len(rows.slots)
            self.slots[:count].copy_(blk_table[metadata.decode_rows, 0])
            rows = rows._replace(slots=self.slots[:count])
        return self._on(replace(metadata, pool=self.pool, rows=rows), blk_table)

    def _on(self, metadata: Metadata, table: Tensor) -> Metadata:
        if metadata.fresh is not None:
            metadata.pool.reset(table[metadata.fresh, 0])
        if metadata.prefill_rows is not None:
            metadata.prefill_slots = table[metadata.prefill_rows, 0].to(torch.int64)
        return metadata


def _only(m: CommonAttentionMetadata, rows: Any, at: Tensor, lengths: Any) -> CommonAttentionMetadata:
    """Some rows of a step as a step of their own, with their states at 1, 2, ... (0 is vLLM's null block)."""
    mine = lengths[rows]
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(mine)]).astype(np.int32))
    index = torch.from_numpy(rows)
    device = m.block_table_tensor.device
    return m.replace(
        query_start_loc=_upload(starts.numpy(), device),
        query_start_loc_cpu=starts,
        seq_lens=m.seq_lens[at],
        num_reqs=len(rows),
        num_actual_tokens=int(mine.sum()),
        max_query_len=int(mine.max()),
        block_table_tensor=torch.arange(1, len(rows) + 1, dtype=torch.int32, device=device)[:, None],
        is_prefilling=torch.ones(len(rows), dtype=torch.bool),
        seq_lens_cpu_upper_bound=m.seq_lens_cpu_upper_bound[index],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def _upload(values: Any, device: torch.device) -> Tensor:
    """A small host array on the device, without a wait."""
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


def _placeholders_are_drafts() -> None:
    """A prompt of one token that joins running rows comes with placeholders for drafts, so that rows stay alike.

    Model runner V2 calls that a prefill, whose tokens all count, and vLLM's own layers keep the placeholders' inputs
    in their states. From here on it is a decode, as V2 has it where the prompt's other tokens were computed before.
    """
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState  # it imports the runner

    own = MambaHybridModelState.prepare_attn
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def prepare_attn(self: Any, input_batch: Any, *arguments: Any, **options: Any) -> Any:
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is not None:
            padded = (drafts > 0) & (input_batch.num_scheduled_tokens == drafts + 1) & input_batch.is_prefilling_np
            known = input_batch.prefill_runs_as_decode_np
            input_batch.prefill_runs_as_decode_np = padded if known is None else known | padded
        return own(self, input_batch, *arguments, **options)

    MambaHybridModelState.prepare_attn = prepare_attn


def _order(name: str) -> tuple[int, ...]:
    """Layers in the order in which a step runs them: by the numbers in their names."""
    return tuple(map(int, re.findall(r"\d+", name)))


# ---- pages ----


class ReplayManager(MambaManager):
    """vLLM's manager of states, without looking for what cannot be: a request has one block from its first step on.

    The scheduler asks the manager of every group of layers three times for every row. A hybrid model has several groups
    (Nemotron-3-Nano-4B seven), and with hundreds of rows that takes as long as the GPU's step. Answers are the same.
    """

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *arguments: Any, **options: Any) -> int:
        if num_tokens <= self.block_size and self.req_to_blocks.get(request_id):
            return 0
        return super().get_num_blocks_to_allocate(request_id, num_tokens, *arguments, **options)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        if num_tokens <= self.block_size and self.req_to_blocks.get(request_id):
            return []
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        if processed_computed_tokens > self.block_size:
            super().remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)


register_all_kvcache_specs(None)  # vLLM's own, which it would take for registered once ours is there


@register_kv_cache_spec(manager_class=ReplayManager, uniform_type_base_spec=MambaSpec)
@dataclass(frozen=True, kw_only=True)
class ReplaySpec(MambaSpec):
    """A page of ours: a checkpoint with its ring, one per request."""


class Mamba2Builder(_Builder, Mamba2AttentionMetadataBuilder):
    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> None:
        """Graphs of rows that differ in length are not offered."""
        return None


class GDNBuilder(_Builder, GDNAttentionMetadataBuilder):
    pass


class Mamba2Backend(Mamba2AttentionBackend):
    @staticmethod
    def get_builder_cls() -> type:
        return Mamba2Builder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


class GDNBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type:
        return GDNBuilder


# ---- layers ----


@dataclass
class _Taken:
    """What a layer holds for us.

    Attributes:
        shape: recurrence, geometry, convolution, dtype of activations, as pool.Layer has them.
        most: T at most.
        page_bytes: of a block.
        index: place among its group's layers.
    """

    settings: Settings
    shape: tuple[str, Geometry, ConvGeometry, torch.dtype]
    most: int
    page_bytes: int
    backend: type
    index: int = 0


class _Layer(MambaBase):
    """Mixed into vLLM's layers. Without our setting every method is the layer's own."""

    replay: _Taken | None = None

    def take_over(self, recurrence: str, geometry: Geometry, conv: ConvGeometry, backend: type) -> None:
        """At the end of a layer's __init__: from here on the state is ours, if the user asked for it.

        Raises:
            ValueError: asked for, and this engine cannot do it.
        """
        config = get_current_vllm_config()
        settings = parse(config.additional_config)
        if settings is None:
            return
        refused = refusals(settings, __version__, config, current_platform.device_type)
        if getattr(self, "activation", "silu") not in ("silu", "swish"):
            refused.append(f"the convolution must be followed by silu; {self.prefix} has {self.activation!r}.")
        if refused:
            raise ValueError("\n".join(["replayssm refuses to start:", *(f"- {why}" for why in refused)]))
        most, dtype = 1 + config.num_speculative_tokens, config.model_config.dtype
        size = page_bytes(recurrence, geometry, settings.window, most, settings.format, dtype, conv, device="cuda")
        self.replay = _Taken(settings, (recurrence, geometry, conv, dtype), most, size, backend)
        _say_page_size(config)
        if most > 1:
            _placeholders_are_drafts()
        own = _spec(tuple(self.get_state_shape()), self.get_state_dtype()).page_size_bytes
        logger.info_once(_memory_sentence(settings, size, most, own))

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec = super().get_kv_cache_spec(vllm_config)
        if self.replay is None or not isinstance(spec, MambaSpec):
            return spec
        return ReplaySpec(
            **{field.name: getattr(spec, field.name) for field in fields(spec)}
            | {
                "shapes": ((self.replay.page_bytes,),), "dtypes": (torch.int8,), "num_speculative_blocks": 0,
                "num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None,
            }
        )  # fmt: skip

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        if self.replay is None:
            super().bind_kv_cache(kv_cache)
        else:
            self.kv_cache: tuple[Tensor, ...] = (kv_cache.squeeze((1, 2)).view(torch.uint8),)

    def get_attn_backend(self) -> Any:
        return super().get_attn_backend() if self.replay is None else self.replay.backend

    def replay_layer(self) -> Layer:
        """What the Pool must know of this layer."""
        assert self.replay is not None
        return Layer(*self.replay.shape, self.kv_cache[0], self.replay_weights())

    def replay_weights(self) -> Any:
        """The recurrence's Weights, from the layer's parameters."""
        raise NotImplementedError

    def replay_step(self) -> Metadata | None:
        """This step's rows; None outside of steps (profiling) and without our setting."""
        everything = get_forward_context().attn_metadata
        found = everything.get(self.prefix) if isinstance(everything, dict) else None
        return found if isinstance(found, Metadata) else None

    @contextmanager
    def replay_prefill(self, step: Metadata) -> Any:
        """Inside, the layer's own code sees the prefill rows alone, and states that the pool handed out."""
        assert self.replay is not None and step.prefill_slots is not None and step.prefill_accepted is not None
        everything, pages = get_forward_context().attn_metadata, self.kv_cache
        index, by_channel = self.replay.index, is_conv_state_dim_first()
        state, window = step.pool.before_prefill(index, step.prefill_slots, step.prefill_accepted, step.anew)
        # the layer's own layouts: [n, W - 1, C] or [n, C, W - 1], and [n, H, V, K]; entry 0 is nobody's
        conv = window if by_channel else window.transpose(1, 2)
        conv, state = (torch.cat([part[:1], part]).contiguous() for part in (conv, state))
        everything[self.prefix], self.kv_cache = step.prefill, (conv, state)
        try:
            yield
        finally:
            everything[self.prefix], self.kv_cache = step, pages
        step.pool.after_prefill(index, state[1:], conv[1:] if by_channel else conv[1:].transpose(1, 2))

    def replay_rows(
        self, step: Metadata, own: Callable[..., Any], x: Tensor, raw_g: Tensor | None, raw_w: Tensor, out: Tensor,
        inputs: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Both kinds of rows: x [n, C], raw_g, raw_w [n, ...], out [n, H, V]; own(*inputs, out) runs vLLM's kernels."""
        assert self.replay is not None
        if step.rows is not None:
            step.pool.decode(self.replay.index, step.rows, x, raw_g, raw_w, out)
        if step.prefill is not None:
            at = step.prefill_tokens
            answers = out[at]
            with self.replay_prefill(step):
                own(*(part[at] for part in inputs), answers)
            if not isinstance(at, slice):
                out[at] = answers


class ReplayMixer2(_Layer, MambaMixer2):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        tp = self.tp_size
        geometry = Geometry(self.num_heads // tp, self.n_groups // tp, self.head_dim, self.ssm_state_size)
        self.take_over("mamba2", geometry, ConvGeometry(self.conv_dim // tp, self.conv_kernel_size), Mamba2Backend)

    def replay_weights(self) -> mamba2.Weights:
        A_log = torch.log(-self.A.data.double()).float()
        bias = self.conv1d.bias
        return mamba2.Weights(
            self.conv_weights,
            None if bias is None else bias.data,
            A_log,
            self.dt_bias.data.float(),
            self.D.data.float(),
        )

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> Any:
        step = self.replay_step()
        if step is None:
            return super().conv_ssm_forward(projected_states, output)
        x, dt = torch.split(
            projected_states[..., self.tped_intermediate_size :], [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        out = output.unflatten(-1, (-1, self.head_dim))
        own = super().conv_ssm_forward

        def prefill(projected: Tensor, answers: Tensor) -> None:
            own(projected, answers.flatten(1))

        self.replay_rows(step, prefill, x, None, dt, out, (projected_states,))


class _DeltaNet(_Layer):
    """Gated DeltaNet of Qwen and OLMo: the layer's own code is _forward_core(mixed_qkv, b, a, core_attn_out)."""

    def take_over_delta_net(self) -> None:
        tp = self.tp_size
        geometry = Geometry(self.num_v_heads // tp, self.num_k_heads // tp, self.head_v_dim, self.head_k_dim)
        self.take_over("gdn", geometry, ConvGeometry(self.conv_dim // tp, self.conv_kernel_size), GDNBackend)

    def replay_weights(self) -> gdn.Weights:
        scale = 2.0 if getattr(self, "allow_neg_eigval", False) else 1.0
        return gdn.Weights(
            self.conv1d.weight.data.squeeze(1), None, self.A_log.data.float(), self.dt_bias.data.float(), scale
        )

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> Any:
        step = self.replay_step()
        if step is None:
            return super()._forward_core(mixed_qkv, b, a, core_attn_out)
        own = super()._forward_core
        self.replay_rows(step, own, mixed_qkv, a, b, core_attn_out, (mixed_qkv, b, a))


class ReplayQwenDeltaNet(_DeltaNet, QwenGatedDeltaNetAttention):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.take_over_delta_net()
        if self.replay is not None:
            self.enable_fused_gdn_spec_decode = False  # its op would keep one state per draft


class ReplayOlmoDeltaNet(_DeltaNet, OlmoHybridGatedDeltaNetAttention):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.take_over_delta_net()


class _First(torch.nn.Module):
    def forward(self, y: Tensor, gate: Any) -> Tensor:
        return y


class ReplayKimiDeltaNet(_Layer, KimiGatedDeltaNetAttention):
    o_norm: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        geometry = Geometry(self.local_num_heads, self.local_num_heads, self.head_dim, self.head_dim)
        self.take_over("kda", geometry, ConvGeometry(3 * self.local_projection_size, self.conv_size), GDNBackend)
        self.replay_no_norm = _First()

    def replay_weights(self) -> kda.Weights:
        return kda.Weights(
            self.conv1d.weight.data.squeeze(1), None, self.A_log.data, self.dt_bias.data, self.gate_lower_bound
        )

    @eager_break_during_capture
    def _forward(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
        step = self.replay_step()
        if step is None:
            super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)
            return
        own, norm = super()._forward, self.o_norm

        def prefill(qkv: Tensor, g: Tensor, raw_beta: Tensor, answers: Tensor) -> None:
            self.o_norm = self.replay_no_norm  # once, below, for all rows
            try:
                own(qkv, g[None], None, raw_beta[None], answers[None])
            finally:
                self.o_norm = norm

        inputs = (mixed_qkv, g1[0], beta[0])
        self.replay_rows(step, prefill, mixed_qkv, g1[0], beta[0], core_attn_out[0], inputs)
        core_attn_out.copy_(norm(core_attn_out, g2))


LAYERS: dict[str, type] = {
    "MambaMixer2": ReplayMixer2,
    "QwenGatedDeltaNetAttention": ReplayQwenDeltaNet,
    "OlmoHybridGatedDeltaNetAttention": ReplayOlmoDeltaNet,
    "KimiGatedDeltaNetAttention": ReplayKimiDeltaNet,
}


def _spec(shapes: Any, dtypes: Any) -> MambaSpec:
    return MambaSpec(block_size=-1, shapes=shapes, dtypes=dtypes)


def _memory_sentence(settings: Settings, ours: int, most: int, own: int) -> str:
    stock = f"{most} x {own / 2**20:.2f} MiB, a state per draft" if most > 1 else f"{own / 2**20:.2f} MiB"
    return (
        f"replayssm: format {settings.format}, window {settings.window}: {ours / 2**20:.2f} MiB per request and layer, "
        f"ring included (vLLM's own: {stock})."
    )


def _say_page_size(config: VllmConfig) -> None:
    """vLLM fits attention's pages to the state's, and asks the model's class how large that is: it must ask us."""
    model_class, _ = ModelRegistry.resolve_model_cls(config.model_config.architecture, model_config=config.model_config)
    if "get_mamba_specs_from_config" in vars(model_class):
        return

    def get_mamba_specs_from_config(cls: Any, vllm_config: VllmConfig) -> list[MambaSpec]:
        context = vllm_config.compilation_config.static_forward_context.values()
        ours = [layer.replay for layer in context if getattr(layer, "replay", None) is not None]
        if not ours:
            shapes = cls.get_mamba_state_shape_from_config(vllm_config)
            return [_spec(shapes, cls.get_mamba_state_dtype_from_config(vllm_config))]
        return [_spec(((taken.page_bytes,),), (torch.int8,)) for taken in ours]

    model_class.get_mamba_specs_from_config = classmethod(get_mamba_specs_from_config)

"""The vLLM plugin's layers and builders beside vLLM's own, on a GPU with vLLM 0.33: one life, both kinds of layer.

Both get the same inputs and run the same prefill kernels; after every step their answers must agree, at the end their
states. Model-level runs (CUDA graphs, torch.compile, preemption) are in benchmarks and `replayssm check --vllm`.
"""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
vllm = pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from vllm.config import (  # noqa: E402
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend  # noqa: E402
from vllm.utils.network_utils import get_open_port  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, get_manager_for_kv_cache_spec  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec  # noqa: E402
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState  # noqa: E402

from replayssm.integrations.vllm import register  # noqa: E402
from replayssm.integrations.vllm.engine import ReplayManager, ReplaySpec, _placeholders_are_drafts  # noqa: E402

HIDDEN, H, DIM = 64, 8, 64
MODELS = {"mamba2": "models/nemotron-h-gsm"}


def config(kind: str, format: str | None, drafts: int, dtype: str) -> VllmConfig:
    model = ModelConfig(
        model=MODELS.get(kind, "models/qwen3.5-gsm"), skip_tokenizer_init=True, dtype=dtype, max_model_len=512
    )
    asked = {} if format is None else {"replayssm": {"format": format, "window": 8}}
    made = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(enable_prefix_caching=False, mamba_ssm_cache_dtype="float32"),
        additional_config=asked | {"gdn_prefill_backend": "triton"},
    )
    made.cache_config.mamba_block_size = 512
    if drafts:
        made.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, prompt_lookup_min=1,
            target_model_config=model, target_parallel_config=ParallelConfig(),
        )  # fmt: skip
    return made


@pytest.fixture(scope="module", autouse=True)
def engine() -> Any:
    """The plugin, and tensor parallelism of one."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["VLLM_GDN_DECODE_KERNEL"] = "triton"
    register()
    with set_current_vllm_config(config("mamba2", None, 0, "float32")):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "nccl")
        initialize_model_parallel(1, 1)
        yield


def make_layer(kind: str, of: VllmConfig) -> Any:
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    dtype = of.model_config.dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(of), torch.device("cuda"):
            if kind == "mamba2":
                layer: Any = MambaMixer2(
                    HIDDEN, 64, 4, H * DIM, True, False, n_groups=2, num_heads=H, head_dim=DIM,
                    model_config=of.model_config, cache_config=of.cache_config, prefix="model.layers.0.mixer",
                )  # fmt: skip
            else:
                hf = SimpleNamespace(
                    hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-6, linear_num_key_heads=H // 2,
                    linear_num_value_heads=H, linear_key_head_dim=DIM, linear_value_head_dim=DIM,
                    linear_conv_kernel_dim=4, linear_allow_neg_eigval=True, torch_dtype=dtype,
                    linear_attn_config={"head_dim": DIM, "num_heads": H, "short_conv_kernel_size": 4},
                )  # fmt: skip
                made = {
                    "gdn": QwenGatedDeltaNetAttention,
                    "olmo": OlmoHybridGatedDeltaNetAttention,
                    "kda": KimiGatedDeltaNetAttention,
                }
                layer = made[kind](hf, of, prefix="model.layers.0.linear_attn")
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(3)
    for name, p in layer.named_parameters():
        random = torch.randn(p.shape, generator=generator) * (0.5 if "conv" in name else 0.2)
        decays = torch.linspace(-3, 1, p.numel()).view(p.shape)
        p.data.copy_({"A": -decays.exp(), "A_log": decays}.get(name, random))
    return layer


class Run:
    """One layer, its blocks and its builder."""

    def __init__(self, kind: str, format: str | None, drafts: int, dtype: str) -> None:
        self.kind, self.config = kind, config(kind, format, drafts, dtype)
        self.layer = make_layer(kind, self.config)
        spec = self.layer.get_kv_cache_spec(self.config)
        size = -(-spec.state_content_size_bytes // 256) * 256
        memory = torch.full((24, 1, 1, size), 0x7F, dtype=torch.int8, device="cuda")
        self.layer.bind_kv_cache(memory[..., : spec.state_content_size_bytes])
        cache = KVCacheConfig(24, [], [KVCacheGroupSpec([self.layer.prefix], spec)])
        initialize_mamba_ssu_backend(self.config.mamba_config, cache)  # as vLLM's runner does
        self.per_request = 1 + spec.num_speculative_blocks
        self.builder = self.layer.get_attn_backend().get_builder_cls()(
            spec, [self.layer.prefix], self.config, torch.device("cuda")
        )
        self.graph: Any = None

    def core(self, inputs: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        if self.kind == "mamba2":
            self.layer.conv_ssm_forward(inputs["projected"], out.flatten(1))
        elif self.kind == "kda":
            self.layer._forward(inputs["x"], inputs["g"][None], inputs["z"], inputs["w"][None], out[None])
        else:
            self.layer._forward_core(inputs["x"], inputs["w"], inputs["g"], out)

    def step(self, m: CommonAttentionMetadata, inputs: dict[str, torch.Tensor], more: dict[str, Any]) -> torch.Tensor:
        out = torch.zeros(len(next(iter(inputs.values()))), H, DIM, dtype=next(iter(inputs.values())).dtype).cuda()
        metadata = self.builder.build(0, m, **more)
        with set_current_vllm_config(self.config), set_forward_context({self.layer.prefix: metadata}, self.config):
            self.core(inputs, out)
        return out

    def replay(self, m: CommonAttentionMetadata, inputs: dict[str, torch.Tensor], more: dict[str, Any]) -> torch.Tensor:
        """The same by a CUDA graph that was captured once, of rows that were nobody's."""
        if self.graph is None:
            nobody = m.replace(block_table_tensor=torch.zeros_like(m.block_table_tensor))
            nobody.is_prefilling = torch.zeros_like(m.is_prefilling)
            self.static = {name: x.clone() for name, x in inputs.items()}
            some = next(iter(inputs.values()))
            self.out = torch.zeros(len(some), H, DIM, dtype=some.dtype, device="cuda")
            metadata = self.builder.build_for_cudagraph_capture(nobody)
            with set_current_vllm_config(self.config), set_forward_context({self.layer.prefix: metadata}, self.config):
                self.core(self.static, self.out)
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.core(self.static, self.out)
        for name, x in inputs.items():
            self.static[name].copy_(x)
        self.builder.build(0, m, **more)
        self.graph.replay()
        return self.out.clone()


class Engine:
    """vLLM's own layer and ours, moved together through an engine's steps."""

    def __init__(self, kind: str, format: str, drafts: int, dtype: str) -> None:
        self.kind, self.drafts, self.dtype = kind, drafts, getattr(torch, dtype)
        self.runs = [Run(kind, None, drafts, dtype), Run(kind, format, drafts, dtype)]
        self.generator, self.random = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.prompt: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.accepted: dict[str, int] = {}
        self.blocks: dict[str, list[list[int]]] = {}
        self.free = [list(range(1, 24)) for _ in self.runs]
        self.apart: set[str] = set()
        self.differences: dict[bool, list[float]] = {False: [], True: []}

    def begin(self, request: str, prompt: int) -> None:
        self.prompt[request], self.computed[request], self.accepted[request] = prompt, 0, 1
        self.apart.discard(request)
        self.blocks[request] = [
            [free.pop(0) for _ in range(run.per_request)] for run, free in zip(self.runs, self.free, strict=True)
        ]

    def end(self, request: str) -> None:
        for free, blocks in zip(self.free, self.blocks.pop(request), strict=True):
            free[:0] = blocks  # taken again first

    def inputs(self, n: int) -> dict[str, torch.Tensor]:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(n, *shape, generator=self.generator).to("cuda", self.dtype)

        if self.kind == "mamba2":
            return {"projected": normal(2 * H * DIM + 2 * 2 * 64 + H)}
        keys = H if self.kind == "kda" else H // 2
        gate = (H, DIM) if self.kind == "kda" else (H,)
        return {"x": normal(2 * keys * DIM + H * DIM), "w": normal(H), "g": normal(*gate), "z": normal(H, DIM)}

    def chunked(self, lengths: Any, prefilling: Any, first: Any) -> Any:
        """Rows of one token, which we replay, that vLLM's own layer sends through its chunked prefill kernels."""
        spec = ~prefilling & (self.drafts > 0)
        prefills = first | (lengths > 1) & ~spec
        # gdn_attn.py: "Reclassify non-spec decodes as prefills when spec decodes exist"
        beside_drafts = self.kind != "mamba2" and bool(spec.any())
        # one branch for all rows where num_prefills > 0
        beside_prefills = self.kind in ("kda", "olmo") and bool(prefills.any())
        return (lengths == 1) & ~spec & (first | beside_drafts | beside_prefills)

    @torch.no_grad()
    def step(self, rows: dict[str, int], graph: bool = False) -> None:
        """Requests bring tokens. Notes the rows' largest differences of answers, relative to the answers' size."""
        names, lengths = list(rows), np.array(list(rows.values()))
        prefilling = np.array([self.computed[name] < self.prompt[name] for name in names])
        drafts = np.where(prefilling, -1, lengths - 1).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        before = np.array([self.computed[name] for name in names])
        lens = (before + lengths).astype(np.int32)
        self.apart |= {names[i] for i in np.flatnonzero(self.chunked(lengths, prefilling, before == 0))}
        accepted = torch.tensor([self.accepted[name] for name in names], dtype=torch.int32, device="cuda")
        inputs = self.inputs(int(starts[-1]))
        answers = []
        for i, run in enumerate(self.runs):
            table = torch.tensor([self.blocks[name][i] for name in names], dtype=torch.int32, device="cuda")
            m = CommonAttentionMetadata(
                query_start_loc=torch.from_numpy(starts).cuda(), query_start_loc_cpu=torch.from_numpy(starts),
                seq_lens=torch.from_numpy(lens).cuda(), num_reqs=len(names), num_actual_tokens=int(starts[-1]),
                max_query_len=int(lengths.max()), max_seq_len=int(lens.max()), block_table_tensor=table,
                slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64, device="cuda"),
                is_prefilling=torch.from_numpy(prefilling), seq_lens_cpu_upper_bound=torch.from_numpy(lens),
            )  # fmt: skip
            more = {}
            if self.drafts:
                more = {"num_accepted_tokens": accepted, "num_decode_draft_tokens_cpu": torch.from_numpy(drafts)}
            work = run.replay if graph and i else run.step
            answers.append(work(m, {name: x.clone() for name, x in inputs.items()}, more).float())
        for name, n, prefill in zip(names, lengths, prefilling, strict=True):
            counted = int(n) if prefill else int(self.random.integers(1, n + 1))
            self.computed[name] += counted
            self.accepted[name] = 1 if prefill else counted
        assert bool(answers[1].isfinite().all())
        gaps = (answers[0] - answers[1]).abs().flatten(1).amax(1) / answers[0].abs().max()
        for name, start, end in zip(names, starts, starts[1:], strict=False):
            self.differences[name in self.apart].append(float(gaps[start:end].max()))

    @torch.no_grad()
    def states(self) -> dict[bool, float]:
        """The largest relative difference of the requests' states, each after its accepted tokens."""
        ours, worst = self.runs[1].builder.pool.cache, {False: 0.0, True: 0.0}
        for name, blocks in self.blocks.items():
            n = self.accepted[name]
            own = self.runs[0].layer.kv_cache[1][blocks[0][n - 1 if self.drafts else 0]].float()
            slot = torch.tensor([blocks[1][0]], device="cuda")
            pending = int(ours.cursors.num_pending[slot])
            cursors = ours.cursors.at(slot)
            state = ours._folded(ours.layers[0], slot, cursors.ring_start, cursors.num_committed + min(n, pending))
            gap = float((own - state[0]).abs().max() / own.abs().max())
            worst[name in self.apart] = max(worst[name in self.apart], gap)
        return worst


# Answers of rows whose tokens all went through the same kind of kernel on both sides; then of rows that vLLM's own
# layer has sent through its chunked prefill kernels while we replayed (`chunked`). In fp32 these multiply in tf32, an
# error of 2^-11 as in fp16 (9e-4 seen), and the state stays apart from then on (4e-4 seen). 16 bits: 8 roundings.
BOUNDS = {
    ("fp32", "float32"): (5e-6, 2e-3),
    ("split16", "float32"): (6e-3, 6e-3),  # bf16 reads of the state
    ("fp32", "float16"): (4e-3, 4e-3),
    ("split16", "float16"): (6e-3, 6e-3),
    ("fp32", "bfloat16"): (3e-2, 3e-2),
}
STATES = {"float32": (5e-6, 1e-3), "float16": (4e-3, 4e-3), "bfloat16": (3e-2, 3e-2)}
EXACT = {"mamba2": "float32", "kda": "float32", "gdn": "float16", "olmo": "float16"}  # vLLM's chunked rule refuses fp32


@pytest.mark.parametrize("kind", list(EXACT))
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("format, dtype", [("fp32", None), ("split16", None), ("fp32", "bfloat16")])
def test_a_life_beside_vllms_own_layer(kind: str, drafts: int, format: str, dtype: str | None) -> None:
    """Prefills in pieces, mixed steps, drafts of every length, recycled blocks, prompts of one token, CUDA graphs."""
    dtype = dtype or EXACT[kind]
    life, T = Engine(kind, format, drafts, dtype), 1 + drafts

    def step(graph: bool = False, **rows: int) -> None:
        life.step(rows, graph)

    life.begin("a", 70)
    life.begin("b", 9)
    step(a=70, b=5)
    step(b=4)
    for _ in range(9):
        step(a=T, b=T)  # nothing but decodes, past a flush
    early = life.states()[False]
    life.begin("c", 45)
    step(a=T, b=1, c=40)
    step(a=T, b=T, c=4)
    step(a=T, b=T, c=1)  # the prompt's last piece is one token
    for _ in range(10):
        step(graph=True, a=T, b=T, c=T)
    step(a=T, b=max(1, T - 1), c=1)
    life.end("b")
    life.begin("d", 1)  # a prompt of one token, on b's block
    step(a=T, c=T, d=1)
    for _ in range(10):
        step(graph=True, a=T, c=T, d=T)
    answers = {apart: max(seen) for apart, seen in life.differences.items()}
    states = life.states()
    print(f"{kind} {format} {dtype}, {drafts} drafts: answers {answers}, states {early} {states} (True: apart)")
    assert early < STATES[dtype][0]
    for apart in (False, True):
        assert answers[apart] < BOUNDS[format, dtype][apart], life.differences[apart]
        assert states[apart] < STATES[dtype][apart]


def test_placeholders_of_a_prompt_of_one_token_are_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of four tokens: such a prompt, a decode, a piece of a prompt; and the last token of another one."""
    seen = []
    monkeypatch.setattr(MambaHybridModelState, "prepare_attn", lambda self, batch: seen.append(batch))
    _placeholders_are_drafts()
    batch = SimpleNamespace(
        num_draft_tokens_per_req=np.array([3, 3, 0, 0]), num_scheduled_tokens=np.array([4, 4, 4, 1]),
        is_prefilling_np=np.array([True, False, True, True]),
        prefill_runs_as_decode_np=np.array([False, False, False, True]),
    )  # fmt: skip
    MambaHybridModelState.prepare_attn(None, batch)
    assert seen[0].prefill_runs_as_decode_np.tolist() == [True, False, False, True]


def test_the_manager_of_pages_answers_as_vllms_own() -> None:
    """Requests come, grow, are preempted, end: the same blocks are given out, however seldom ours looks."""
    sizes = {"shapes": ((64,),), "dtypes": (torch.int8,), "block_size": 96}
    managers = []
    for spec in (MambaSpec(**sizes), ReplaySpec(**sizes)):
        pool = BlockPool(12, enable_caching=False, hash_block_size=96)
        managers.append(
            get_manager_for_kv_cache_spec(
                spec, max_in_flight_tokens=64, max_model_len=96, block_pool=pool, enable_caching=False,
                kv_cache_group_id=0, scheduler_block_size=96,
            )
        )  # fmt: skip
    assert [type(manager) for manager in managers] == [MambaManager, ReplayManager]
    random, tokens = np.random.default_rng(0), dict[str, int]()
    for _ in range(2000):
        name = str(random.integers(16))
        before = tokens.get(name, 0)
        if before and (random.random() < 0.05 or before > 90):
            for manager in managers:
                manager.free(name)
            del tokens[name]
            continue
        after = before + int(random.integers(1, 7))
        for manager in managers:
            manager.remove_skipped_blocks(name, before)
        need, mine = (
            manager.get_num_blocks_to_allocate(name, after, [], before, before, after) for manager in managers
        )
        assert need == mine
        if need > managers[0].block_pool.get_num_free_blocks():
            continue
        given, ours = (manager.allocate_new_blocks(name, after, after) for manager in managers)
        assert [block.block_id for block in given] == [block.block_id for block in ours]
        tokens[name] = after
        held, kept = ([block.block_id for block in manager.req_to_blocks[name]] for manager in managers)
        assert held == kept and len(held) == 1

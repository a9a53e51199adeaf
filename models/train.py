"""Train, evaluate and export the small hybrid models of this folder, and what drafts tokens for them.

What: NemotronH-style (Mamba-2 + attention + MLP) and Qwen3.5-style (Gated DeltaNet + gated attention) models of
about 4.7 M parameters, trained from scratch on streams of gsm_symbolic word problems (reasoning-gym 0.1.25):

    Q: <question>\nA:\n<label: steps>\n...\n#### <answer>\n\nQ: ...

How: the Transformers models themselves are trained; only three functions inside them are replaced, by the chunked
forms below (the recurrences as matrix products, written for torch.compile). Matrices are trained with Muon, the
rest with AdamW; the learning rate follows the wall clock, so a run ends when its minutes end.
Dtypes: fp32 weights and residual stream, bf16 matrix products, fp32 (TF32 products) recurrences. The exported
weights are rounded to bf16 and evaluated after rounding, in fp32.

Drafts: `train --draft` makes a smaller sibling (about 1.5 M parameters, a layer of each kind); `train-mtp` trains a
multi-token-prediction head on a finished qwen3.5 model, whose weights stay as they are, unrolled as it will draft.

Commands: tokenizer, train, train-mtp, evaluate, stream, write-heldout, init, curve. README.md has the exact lines.
"""

import hashlib
import json
import math
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import torch.nn.functional as F
import transformers
import typer
from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import GSMSymbolicDataset, GSMSymbolicDatasetConfig
from solutions import PLANS, solve
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5

from replayssm.integrations.transformers.mtp import MTPHead

HERE = Path(__file__).parent
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the data workers are forks
SUFFIX = " Give the result as your final answer. Do not include units."
QUESTION_WEIGHT = 0.2  # loss weight of question tokens; their names and numbers cannot be predicted
PAD, EOS, END = "<pad>", "<eos>", "\n\n"  # END closes every problem and is one token

# --- Problems -------------------------------------------------------------------------------------------------


class Problem:
    def __init__(self, entry: dict, template: int):
        self.template = template
        self.question = entry["question"].removesuffix(SUFFIX)
        self.answer = entry["answer"]
        self.solution = solve(template, self.question, entry["metadata"]["variables"], self.answer)

    prompt = property(lambda self: f"Q: {self.question}\nA:\n")
    completion = property(lambda self: f"{self.solution}{END}")
    key = property(lambda self: hashlib.sha256(self.question.encode()).digest()[:12])


def problems(seed: int, size: int) -> list[Problem]:
    """gsm_symbolic problems, without the 0.15 % whose answer contradicts exact arithmetic (see solutions.py)."""
    dataset = GSMSymbolicDataset(GSMSymbolicDatasetConfig(seed=seed, size=size))
    found = []
    for i, template in enumerate(dataset.task_indices):
        try:
            found.append(Problem(dataset[i], template))
        except ValueError:
            continue
    return found


HELDOUT_SEED, TOKENIZER_SEED, TRAIN_SEED, BLOCK = 1_000_000, 2_000_000, 1_000_000_000, 2048
N_ALONE, N_STREAMS, SHOTS = 1024, 1024, 15


def heldout() -> tuple[list[Problem], list[list[Problem]]]:
    """(problems to solve alone, streams of 16 problems of which the last is to be solved)."""
    found = problems(HELDOUT_SEED, N_ALONE + N_STREAMS * (SHOTS + 1) + 200)
    streams = found[N_ALONE : N_ALONE + N_STREAMS * (SHOTS + 1)]
    return found[:N_ALONE], [streams[i : i + SHOTS + 1] for i in range(0, len(streams), SHOTS + 1)]


class Streams(IterableDataset):
    """Endless (ids [T+1], weights [T+1]) sequences of fresh problems, none of which is held out.

    Three problems in four come from the template that follows the last one's in a fixed order, so that a model which
    invents its next problem greedily moves through all templates instead of copying its last problem forever.
    """

    ORDER, FOLLOW = Random(0).sample(list(PLANS), len(PLANS)), 0.75

    def __init__(self, folder: Path, length: int, seed: int):
        self.folder, self.length, self.seed = folder, length, seed

    def __iter__(self):
        torch.set_num_threads(1)
        worker, workers = get_worker_info().id, get_worker_info().num_workers
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        alone, streams = heldout()
        banned = {p.key for p in alone} | {p.key for s in streams for p in s}
        rng, block, pool = Random(1000 * self.seed + worker), worker, {template: [] for template in PLANS}
        while True:
            ids, weights, place = [], [], 0
            while len(ids) <= self.length:
                follow = ids and rng.random() < self.FOLLOW
                place = (place + 1) % len(self.ORDER) if follow else rng.randrange(len(self.ORDER))
                while not pool[self.ORDER[place]]:
                    found = problems(TRAIN_SEED * (1 + self.seed) + block * BLOCK, BLOCK)
                    block += workers
                    found = [p for p in found if p.key not in banned]
                    prompts = tokenizer.encode_batch_fast([p.prompt for p in found])
                    completions = tokenizer.encode_batch_fast([p.completion for p in found])
                    for p, q, a in zip(found, prompts, completions, strict=True):
                        pool[p.template].append((q.ids, a.ids))
                question, answer = pool[self.ORDER[place]].pop()
                ids += question + answer
                weights += [QUESTION_WEIGHT] * len(question) + [1.0] * len(answer)
            n = self.length + 1
            yield torch.tensor(ids[:n], dtype=torch.int16), torch.tensor(weights[:n])


# --- Tokenizer and configurations -------------------------------------------------------------------------------


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; a digit, a run of newlines, a word with its space and a run of symbols never merge."""
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r" ?[A-Za-z]+|[0-9]|\n+| ?[^\sA-Za-z0-9]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((p.prompt + p.completion for p in problems(TOKENIZER_SEED, 20_000)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left", model_max_length=65536
    )


def configuration(arch: str, tokenizer, draft: bool = False) -> transformers.PreTrainedConfig:
    """Of the model itself, or of its smaller sibling: one layer of each kind, of the same widths."""
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 65536,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "bfloat16",
    }
    if arch == "nemotron-h":
        return transformers.NemotronHConfig(
            hybrid_override_pattern="M-*-" if draft else "M-M-M*-M-M*-M-",
            mamba_num_heads=4,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=2,
            expand=1,
            conv_kernel=4,
            chunk_size=64,
            intermediate_size=512 if draft else 608,
            time_step_min=1e-20,  # Transformers clamps steps at it in the chunked form only: too small to matter
            **shared,
        )
    return transformers.Qwen3_5TextConfig(
        num_hidden_layers=2 if draft else 8,
        full_attention_interval=2 if draft else 4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        intermediate_size=384,
        tie_word_embeddings=True,
        **shared,
    )


def new_model(arch: str, tokenizer, draft: bool = False) -> transformers.PreTrainedModel:
    """Random weights; steps dt start log-uniform in [0.001, 0.1] and decay rates uniform in [1, 16], as in Mamba-2."""
    model = AutoModelForCausalLM.from_config(configuration(arch, tokenizer, draft), dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "A_log"):
            dt = torch.exp(torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)))
            module.dt_bias.data = dt + torch.log(-torch.expm1(-dt))
            module.A_log.data = torch.empty_like(module.A_log).uniform_(1, 16).log()
    return model


# --- Chunked recurrences ------------------------------------------------------------------------------------------
# Shapes: B rows, T tokens, H value heads, G key groups, K key and V value width, N chunks of C tokens.


def decay_matrix(g):
    """g [..., C], log decays per token -> D [..., C, C], D[i, j] = exp(g_{j+1} + ... + g_i) for j <= i, else 0."""
    total = g.cumsum(-1)
    difference = total[..., :, None] - total[..., None, :]
    causal = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    return difference.masked_fill(~causal, -torch.inf).exp()


def to_chunks(x, chunk):
    """[B, T, H, ...] -> [B, H, N, C, ...] in fp32; T is padded with zeros."""
    x = F.pad(x.float(), [0, 0] * (x.dim() - 2) + [0, -x.shape[1] % chunk])
    return x.unflatten(1, (-1, chunk)).movedim(3, 1)


def chunked_ssd(x, dt, A, B, C, chunk_size, D, dt_bias, initial_states=None, return_final_states=False, **_):
    """Mamba-2, h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t + D x_t. Same arguments as Transformers'.

    x [B, T, H, V], dt [B, T, H], A [H], B and C [B, T, G, K] -> y [B, T, H, V], state [B, H, V, K].
    """
    with torch.autocast(x.device.type, enabled=False):
        T, repeat = x.shape[1], x.shape[2] // B.shape[2]
        dt = F.softplus(dt.float() + dt_bias.float())
        skip = D[:, None] * x.float()
        g, v = to_chunks(dt * A, chunk_size), to_chunks(x.float() * dt[..., None], chunk_size)
        k = to_chunks(B, chunk_size).repeat_interleave(repeat, 1)
        q = to_chunks(C, chunk_size).repeat_interleave(repeat, 1)
        total = g.cumsum(-1)
        # 1. Within a chunk: attention with decay.
        y = (q @ k.mT * decay_matrix(g)) @ v
        # 2. What each chunk adds to the state at its end.
        added = (k * (total[..., -1:] - total).exp()[..., None]).mT @ v
        # 3. States before each chunk: decay over the chunks between.
        first = torch.zeros_like(added[:, :, :1]) if initial_states is None else initial_states.float().mT[:, :, None]
        across = decay_matrix(F.pad(total[..., -1], (1, 0)))
        states = (across @ torch.cat([first, added], 2).flatten(3)).unflatten(3, added.shape[3:])
        # 4. What the state before the chunk gives to its tokens.
        y = y + q * total.exp()[..., None] @ states[:, :, :-1]
        y = y.movedim(1, 3).flatten(1, 2)[:, :T] + skip
    return (y, states[:, :, -1].mT) if return_final_states else y


def unit_lower_inverse(L):
    """(I + L)^-1 for strictly lower L [..., C, C]: blocks double by [[P, 0], [R, Q]]^-1 = [[P', 0], [-Q'RP', Q']]."""
    size = L.shape[-1]
    inverse = L.new_ones(*L.shape[:-2], size, 1, 1)
    s = 1
    while s < size:
        blocks = L.unflatten(-2, (-1, 2 * s)).unflatten(-1, (-1, 2 * s)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        P, Q, R = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :], blocks[..., s:, :s]
        if s <= 4:  # tiny blocks: sums that the compiler fuses
            RP = (R[..., :, :, None] * P[..., None, :, :]).sum(-2)
            low = -(Q[..., :, :, None] * RP[..., None, :, :]).sum(-2)
        else:
            low = -Q @ (R @ P)
        inverse = torch.cat([torch.cat([P, torch.zeros_like(P)], -1), torch.cat([low, Q], -1)], -2)
        s *= 2
    return inverse.squeeze(-3)


def chunked_gated_delta(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False, **_):
    """Gated delta rule, S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - exp(g_t) S_{t-1}^T k_t)^T, o_t = S_t^T q_t.

    query, key [B, T, H, K] (normalised here), value [B, T, H, V], g, beta [B, T, H] -> o [B, T, H, V], S [B, H, K, V].
    """
    with torch.autocast(query.device.type, enabled=False):
        T, dtype = query.shape[1], query.dtype
        q, k, v, g, beta = (to_chunks(x, chunk_size) for x in (query, key, value, g, beta))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        total, D, beta = g.cumsum(-1), decay_matrix(g), beta[..., None]
        grow, rest = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
        # 1. Within a chunk the corrected values are U - W S, with S the state before the chunk.
        inverse = unit_lower_inverse((beta * k @ k.mT * D).tril(-1))
        W, U = inverse @ (beta * grow * k), inverse @ (beta * v)
        # 2. A chunk maps the state S to M S + P.
        decayed_k = (k * rest).mT
        M = torch.diag_embed(total[..., -1:].exp().expand(*total.shape[:-1], k.shape[-1])) - decayed_k @ W
        P = decayed_k @ U
        if initial_state is not None:
            P = torch.cat([M[:, :, :1] @ initial_state.float()[:, :, None] + P[:, :, :1], P[:, :, 1:]], 2)
        # 3. States after each chunk: compose these maps over the chunks, doubling the reach.
        s = 1
        while s < P.shape[2]:
            P = torch.cat([P[:, :, :s], M[:, :, s:] @ P[:, :, :-s] + P[:, :, s:]], 2)
            M = torch.cat([M[:, :, :s], M[:, :, s:] @ M[:, :, :-s]], 2)
            s *= 2
        first = torch.zeros_like(P[:, :, :1]) if initial_state is None else initial_state.float()[:, :, None]
        S = torch.cat([first, P[:, :, :-1]], 2)
        # 4. Outputs.
        o = q * grow @ S + (q @ k.mT * D) @ (U - W @ S)
        o = o.movedim(1, 3).flatten(1, 2)[:, :T].to(dtype)
    return o, P[:, :, -1] if output_final_state else None


def shifted_conv(hidden_states, weight, bias=None, activation=None, **_):
    """Causal depthwise convolution [B, D, T] as a sum of shifts, which the compiler fuses. weight [D, taps]."""
    T, taps = hidden_states.shape[-1], weight.shape[-1]
    padded = F.pad(hidden_states, (taps - 1, 0))
    out = sum(padded[..., i : i + T] * weight[:, i, None] for i in range(taps))
    out = out if bias is None else out + bias[:, None]
    return (F.silu(out) if activation else out).to(hidden_states.dtype)


def use_chunked_forms():
    """Replace Transformers' slow reference functions, in place, for training and prefill."""
    modeling_nemotron_h.mamba2_chunk_scan = chunked_ssd
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_gated_delta
    modeling_nemotron_h.causal_conv1d_fn = modeling_qwen3_5.causal_conv1d_fn = shifted_conv


# --- Training -----------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (five Newton-Schulz steps in bf16), matrices of one shape at a time."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.1):
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                grads = torch.stack([p.grad for p in params])
                state = self.state[params[0]]
                m = state.setdefault("m", torch.zeros_like(grads))
                m.lerp_(grads, 1 - group["momentum"])
                x = grads.lerp(m, group["momentum"]).bfloat16()  # Nesterov
                x = x.mT if shape[0] > shape[1] else x
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = (x.mT if shape[0] > shape[1] else x).float() * (0.2 * max(shape) ** 0.5)  # RMS as AdamW's
                for p, update in zip(params, x, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def optimizers(model, lr: float):
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    fused = rest[0].is_cuda
    return Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)


def schedule(done: float) -> float:
    """Learning-rate factor for the share of the run that is done: warm-up, constant to 40 %, linear to 0."""
    return min(1.0, done / 0.02, max(0.0, (1 - done) / 0.6))


def weighted_loss(hidden, head, targets, weights):
    """(mean loss over all tokens by weight, mean loss of answer tokens, share of answer tokens predicted right)."""
    with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
        logits = hidden @ head.mT
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    weights, answers = weights.flatten(), (weights.flatten() == 1).float()
    right = (logits.argmax(-1).flatten() == targets.flatten()).float()
    n = answers.sum()
    return (losses * weights).sum() / weights.sum(), (losses * answers).sum() / n, (right * answers).sum() / n


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def tokenizer(out: Path, vocab_size: int = 1024):
    """Train the shared tokenizer and write it to OUT."""
    train_tokenizer(vocab_size).save_pretrained(out)


def started_log(arch: str, module: torch.nn.Module) -> dict:
    """What training.json says before the first step."""
    parameters = sum(p.numel() for p in module.parameters())
    return {"arch": arch, "parameters": parameters, "runs": [], "curve": [], "tokens": 0, "steps": 0}


def fit(loss, module, log: dict, run: dict, workers: int, max_steps: int, report_every: float) -> None:
    """Minimise loss(ids, weights) over the parameters of `module` for run["minutes"]; counts and curve go into log.

    Args:
        loss: (ids [B, T + 1], weights [B, T + 1]) on the device -> (loss, its parts named below...).
        run: minutes, batch, length, lr, seed, data_seed, resumed; completed and appended to log["runs"].
    """
    device, arch, minutes = next(module.parameters()).device.type, log["arch"], run["minutes"]
    trained = [p for p in module.parameters() if p.requires_grad]
    opts = optimizers(module, run["lr"])
    loader = DataLoader(
        Streams(HERE / "tokenizer", run["length"], run["data_seed"]),
        batch_size=run["batch"],
        num_workers=workers,
        pin_memory=device == "cuda",
        prefetch_factor=8,
    )

    def step(ids, weights, factor):
        ids, weights = ids.to(device, non_blocking=True).long(), weights.to(device, non_blocking=True)
        result = loss(ids, weights)
        result[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = run["lr"] * factor
            opt.step()
            opt.zero_grad(set_to_none=True)
        return torch.stack([x.detach() for x in (*result, norm)])

    data = iter(loader)
    ids, weights = next(data)
    started = time.time()
    step(ids, weights, 0.0)  # compiles; moves nothing
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{arch}: {log['parameters']} parameters, first step {time.time() - started:.1f} s", flush=True)

    begin, reported, recent = time.time(), time.time(), []
    run["command"] = " ".join(["train.py", *(a if "/" not in a else Path(a).name for a in sys.argv[1:])])
    run["steps"], per_step = 0, run["batch"] * run["length"]
    while (done := (time.time() - begin) / (60 * minutes)) < 1 and run["steps"] < max_steps:
        recent.append(step(*next(data), schedule(done)))
        run["steps"] += 1
        log["steps"] += 1
        log["tokens"] += per_step
        if run["steps"] % 8 == 0 and device == "cuda":
            torch.cuda.synchronize()  # keeps the clock honest and the queue short
        if time.time() - reported > report_every or run["steps"] in (1, max_steps):
            mean = torch.stack(recent).mean(0).tolist()
            if not math.isfinite(mean[0]):
                raise SystemExit(f"{arch}: loss is {mean[0]} at step {log['steps']}")
            rate = len(recent) * per_step / (time.time() - reported)
            names = ("loss", "answer_loss", "answer_token_accuracy", "gradient_norm")
            log["curve"].append(
                dict(
                    step=log["steps"],
                    tokens=log["tokens"],
                    **{n: round(x, 5) for n, x in zip(names, mean, strict=True)},
                )
            )
            print(f"{arch} {done:5.2f} {json.dumps(log['curve'][-1])} {rate / 1e3:.0f}k tokens/s", flush=True)
            reported, recent = time.time(), []
    run["seconds"] = round(time.time() - begin, 1)
    log["runs"].append(run)
    log["date"] = str(date.today())
    log["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "reasoning_gym": "0.1.25",
    }
    log["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"


@app.command()
def train(
    arch: str,
    out: Path,
    minutes: Annotated[float, typer.Option(help="wall-clock minutes of training")],
    draft: Annotated[bool, typer.Option("--draft", help="the smaller sibling that drafts for ARCH")] = False,
    batch: int = 8,
    length: int = 8192,
    lr: float = 5e-3,
    seed: int = 0,
    data_seed: int = 0,
    workers: int = 12,
    compile: bool = True,
    max_steps: int = 10**9,
    resume: Annotated[Path | None, typer.Option(help="folder of an earlier run: its weights, counts and curve")] = None,
    report_every: float = 15.0,
):
    """Train ARCH (nemotron-h or qwen3.5) and write a Transformers checkpoint with training.json to OUT."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    use_chunked_forms()
    tok = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    if resume:
        model = AutoModelForCausalLM.from_pretrained(resume, dtype=torch.float32)
        log = json.loads((resume / "training.json").read_text())
    else:
        model = new_model(arch, tok, draft)
        log = started_log(arch + "-draft" * draft, model)
    model.to(device).train()
    head = model.get_output_embeddings().weight
    loss_function = weighted_loss
    if compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        loss_function = torch.compile(weighted_loss, dynamic=False)

    def loss(ids, weights):
        with torch.autocast(device, dtype=torch.bfloat16):
            hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        return loss_function(hidden, head, ids[:, 1:], weights[:, 1:])

    run = {
        "minutes": minutes,
        "batch": batch,
        "length": length,
        "lr": lr,
        "seed": seed,
        "data_seed": data_seed,
        "resumed": resume is not None,
    }
    fit(loss, model, log, run, workers, max_steps, report_every)
    export(model, tok, out, log)


@app.command()
def train_mtp(
    folder: Path,
    minutes: Annotated[float, typer.Option(help="wall-clock minutes of training")],
    depth: Annotated[int, typer.Option(help="drafts in a row that it is trained for")] = 4,
    batch: int = 16,
    length: int = 2048,
    lr: float = 5e-3,
    seed: int = 0,
    data_seed: int = 7,
    workers: int = 12,
    compile: bool = True,
    max_steps: int = 10**9,
    report_every: float = 15.0,
):
    """Train a multi-token-prediction head for the finished model in FOLDER; writes mtp.safetensors and mtp.json there.

    Entry i of depth d is made of token i + d's embedding and the hidden state that depth d - 1 gave at i (depth 0: the
    model's own); it attends, as when it drafts, to depth 1 up to i and to its own chain, and predicts token i + d + 1.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    use_chunked_forms()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval().requires_grad_(False)
    head = MTPHead(model.model).float().to(device).train()
    loss_function = weighted_loss
    if compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        loss_function = torch.compile(weighted_loss, dynamic=False)
    n = length - depth  # entries
    tril, own = torch.ones(n, n, dtype=torch.bool, device=device).tril(), torch.eye(n, dtype=torch.bool, device=device)

    def loss(ids, weights):
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[:, :n].float()
        parts, cache = [], head.new_cache()
        for d in range(1, depth + 1):
            mask = torch.cat([tril] + [own] * (d - 1), 1).expand(batch, 1, -1, -1)
            positions = torch.arange(d - 1, d - 1 + n, device=device).expand(batch, -1)
            with torch.autocast(device, dtype=torch.bfloat16):
                hidden = head(ids[:, d : d + n], hidden, positions, mask, cache)
            at = slice(d + 1, d + 1 + n)
            parts.append(torch.stack(loss_function(hidden, model.lm_head.weight, ids[:, at], weights[:, at])))
        return torch.stack(parts).mean(0).unbind()

    log = started_log("qwen3.5-mtp", head)
    run = {"minutes": minutes, "batch": batch, "length": length, "lr": lr, "seed": seed, "data_seed": data_seed}
    run |= {"depth": depth, "resumed": False}
    fit(loss, head, log, run, workers, max_steps, report_every)
    head.save(folder / "mtp.safetensors", torch.bfloat16)
    (folder / "mtp.json").write_text(json.dumps(log, indent=1) + "\n")


def export(model, tok, out: Path, log: dict):
    """A standard checkpoint in bf16: weights, configuration, generation configuration, tokenizer, training.json."""
    out.mkdir(parents=True, exist_ok=True)
    clean = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    clean.load_state_dict(model.state_dict())
    clean = clean.to(torch.bfloat16)
    clean.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id, max_new_tokens=256
    )
    clean.save_pretrained(out)
    tok.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(log, indent=1) + "\n")


# --- Evaluation -----------------------------------------------------------------------------------------------------


def answer_of(text: str) -> str | None:
    """The number after the first ####."""
    _, mark, rest = text.partition("#### ")
    return rest.split("\n")[0].strip() if mark else None


def correct(text: str, answer: str) -> bool:
    try:
        return float(answer_of(text)) == float(answer)
    except (TypeError, ValueError):
        return False


@torch.no_grad()
def complete(model, tok, prompts: list[str], batch: int, max_new_tokens: int = 256) -> list[str]:
    """Greedy completions, each up to its first END."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts = [""] * len(prompts)
    for i in range(0, len(order), batch):
        rows = order[i : i + batch]
        inputs = tok([prompts[r] for r in rows], return_tensors="pt", padding=True, return_token_type_ids=False).to(
            model.device
        )
        ids = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=tok.encode(END)[0],
            pad_token_id=tok.pad_token_id,
        )
        for r, row in zip(
            rows, tok.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True), strict=True
        ):
            texts[r] = row
    return texts


@torch.no_grad()
def answer_loss(model, tok, streams: list[list[Problem]]) -> float:
    """Mean cross-entropy of the solutions' tokens in streams of reference problems, stream by stream."""
    total, count = 0.0, 0
    for stream in streams:
        parts = [ids for p in stream for ids in tok([p.prompt, p.completion])["input_ids"]]
        ids = torch.tensor([sum(parts, [])], device=model.device)
        answer = torch.tensor([i % 2 for i, part in enumerate(parts) for _ in part], device=model.device)[1:]
        logits = model(ids, use_cache=False).logits[0, :-1]
        total += (F.cross_entropy(logits, ids[0, 1:], reduction="none") * answer).sum().item()
        count += answer.sum().item()
    return total / count


def interval(right: int, n: int) -> list[float]:
    """95 % Wilson interval of right / n."""
    z, p = 1.96, right / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [round((middle - half) / (1 + z * z / n), 4), round((middle + half) / (1 + z * z / n), 4)]


@app.command()
def evaluate(
    folder: Path, n: int = 1024, batch: int = 256, fast: bool = True, settings: str = "alone,16th", show: int = 0
):
    """Greedy accuracy of the checkpoint in FOLDER on N held-out problems; written into its training.json."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")
    if fast:
        use_chunked_forms()
    tok = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    alone, streams = heldout()
    tasks = {
        "alone": [(p.prompt, p) for p in alone[:n]],
        "16th": [("".join(p.prompt + p.completion for p in s[:-1]) + s[-1].prompt, s[-1]) for s in streams[:n]],
    }
    log = json.loads((folder / "training.json").read_text())
    log.setdefault("accuracy", {})
    log["heldout_answer_loss"] = round(answer_loss(model, tok, streams[: n // 8]), 6)
    for name in settings.split(","):
        started = time.time()
        prompts, targets = zip(*tasks[name], strict=True)
        texts = complete(model, tok, list(prompts), batch)
        good = [correct(t, p.answer) for t, p in zip(texts, targets, strict=True)]
        exact = sum(t.strip() == p.solution for t, p in zip(texts, targets, strict=True))
        templates = {}
        for g, p in zip(good, targets, strict=True):
            counts = templates.setdefault(p.template, [0, 0])
            counts[0] += g
            counts[1] += 1
        right = sum(good)
        log["accuracy"][name] = {
            "right": right,
            "n": len(good),
            "share": round(right / len(good), 4),
            "interval_95": interval(right, len(good)),
            "solution_identical": exact,
            "seconds": round(time.time() - started, 1),
            "device": device,
            "imperfect_templates": {k: v for k, v in sorted(templates.items()) if v[0] < v[1]},
        }
        print(f"{folder.name} {name}: {json.dumps(log['accuracy'][name])}", flush=True)
        wrong = [(t, p) for t, p, g in zip(texts, targets, good, strict=True) if not g]
        for t, p in wrong[:show]:
            print(f"--- template {p.template}\n{p.prompt}{t}\n(reference)\n{p.solution}", flush=True)
    (folder / "training.json").write_text(json.dumps(log, indent=1) + "\n")


@app.command()
@torch.no_grad()
def stream(folder: Path, tokens: int = 2000, start: str = "", temperature: float = 0.0, seed: int = 0):
    """Print TOKENS tokens: the model solves START (by default the first held-out problem), then problems it invents."""
    torch.manual_seed(seed)
    tok = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tok(start or heldout()[0][0].prompt, return_tensors="pt", return_token_type_ids=False)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    print(tok.decode(model.generate(**inputs, **sampling, max_new_tokens=tokens, eos_token_id=[])[0]))


@app.command()
def write_heldout(out: Path = HERE / "heldout.jsonl", n: int = N_ALONE):
    """The first N problems of the `alone` set, one JSON object a line."""
    rows = [
        {"template": p.template, "question": p.question, "prompt": p.prompt, "solution": p.solution, "answer": p.answer}
        for p in heldout()[0][:n]
    ]
    out.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))


@app.command()
def init(arch: str, out: Path, draft: bool = False):
    """A checkpoint with random weights, for tests of everything around the model."""
    tok = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    export(new_model(arch, tok, draft), tok, out, {"arch": arch, "runs": [], "curve": []})


@app.command()
def curve(folders: list[Path]):
    """Draw the loss curve of each folder's training.json as loss.png beside it."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    for folder in folders:
        points = json.loads((folder / "training.json").read_text())["curve"]
        figure, axes = plt.subplots(figsize=(6, 3.2), dpi=90, layout="constrained")
        for name, label in (("loss", "all tokens (questions weigh 0.2)"), ("answer_loss", "worked steps and answers")):
            axes.semilogy([p["tokens"] / 1e6 for p in points], [p[name] for p in points], label=label)
        axes.set(xlabel="million tokens", ylabel="cross-entropy (nats)", title=folder.name)
        axes.legend()
        figure.savefig(folder / "loss.png")
        plt.close(figure)


if __name__ == "__main__":
    app()

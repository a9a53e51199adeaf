"""One vLLM engine in a process of its own: a job in, one JSON document out. What `e2e` and `vllm_check` start.

    run_all(jobs)                         the caller's side: starts the processes, waits, reads their documents
    python -m replayssm.bench.vllm_process JOB.json OUT.json      the process

Three modes, which differ in nothing but what is said here:

    stock         vLLM as it is. Mamba-2's state kernel is tuned first: vLLM reads launches by a file, and its own are
                  far off for some sizes
    replay        this library's plugin, through `additional_config={"replayssm": {"format": ..., "window": ...}}`
    vllm-replay   vLLM's own replayed kernels (`use_replayssm`), which need model runner V1

The engine runs in the process itself (no engine process), so that its scheduler can be read and stepped. Everything
here was checked against vLLM 0.33.0. The upper half of the file needs no vLLM and is tested without.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

MODES = ("stock", "replay", "vllm-replay")
TEXT_TOKENS = 512  # of a text prompt; longer ones lose their beginning
RANDOM_TOKENS = 48  # of a random prompt, at most
MOST = 20  # log-probabilities of a position that vLLM reports unless told otherwise
COMMAND = (sys.executable, "-m", "replayssm.bench.vllm_process")


@dataclass(frozen=True)
class Job:
    """What an engine is to be and to do.

    Attributes:
        task: "decode" (steps are timed) or "logprobs" (tokens are forced).
        model: a folder or a hub's name; folder of a config.json where `dummy`.
        format, window: of the checkpoint and its ring (replay); records in vLLM's own ring (vllm-replay).
        state: dtype of the stock state, as vLLM names it.
        batches: requests decoded at once, one measurement each.
        drafts, method, acceptance: draft tokens per step, their source, and the forced mean of tokens per step.
        runner: "v1" or "v2"; None: vLLM's choice.
        kernel: H, G, V, K of Mamba-2 layers on this GPU, whose stock kernel is to be tuned; None: nothing to tune.
        tuned: folder that keeps launch files, in a folder for every number of tokens per row: kernels differ.
        texts: prompts; None: random token ids.
        sequences, seats, ways: of the task "logprobs", see `logprobs`.
        turn: the file whose coming says that the process may use the GPU; None: it may.
        engine: further arguments of LLM(...), which win.
    """

    task: str
    model: str
    mode: str
    format: str = "fp32"
    window: int = 16
    state: str = "float32"
    batches: tuple[int, ...] = (1,)
    steps: int = 128
    repeats: int = 1
    drafts: int = 0
    method: str | None = None
    acceptance: float | None = None
    runner: str | None = None
    eager: bool = False
    compiled: bool = True
    dummy: bool = False
    tensor_parallel: int = 1
    kernel: dict[str, int] | None = None
    tuned: str | None = None
    texts: list[str] | None = None
    sequences: list[list[list[int]]] | None = None
    seats: int = 8
    ways: tuple[str, ...] = ()
    turn: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)


class Failed(RuntimeError):
    """A process that ended without a document. The sentence says why, and where its output lies."""


def new_tokens(job: Job) -> int:
    """The most tokens that a request can get: admission, two windows to warm up, the timed steps, and some to spare."""
    if job.task == "logprobs":
        return job.steps + 16
    steps = 4 * job.window + job.repeats * job.steps + 16
    return steps * (1 if not job.drafts else math.ceil(job.acceptance or 1 + job.drafts))


def launch_folder(job: Job) -> Path | None:
    """Where vLLM is to look for launches."""
    return None if job.tuned is None else Path(job.tuned) / f"tokens-{1 + job.drafts}"


def capture_sizes(job: Job) -> list[int]:
    """Tokens of the steps that get a CUDA graph: every batch, and eighths of it for engines that have less room."""
    rows = {-(-batch * i // 8) for batch in job.batches for i in range(1, 9)}
    return sorted(n * (1 + job.drafts) for n in rows)


def engine_arguments(job: Job) -> dict[str, Any]:
    """What LLM(...) gets."""
    rows = job.seats if job.task == "logprobs" else max(job.batches)
    prompt = RANDOM_TOKENS if job.texts is None else TEXT_TOKENS
    given: dict[str, Any] = {
        "model": job.model,
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(8192, rows * (1 + job.drafts)),
        "max_model_len": prompt + new_tokens(job),
        "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": job.tensor_parallel,
        "enable_prefix_caching": False,
        "mamba_ssm_cache_dtype": job.state,
        "gdn_prefill_backend": "triton",  # the same on both sides, and needs no further package
        "language_model_only": True,  # no effect on models of text only
        "seed": 0,
    }
    if job.dummy:
        given |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if job.eager:
        given["enforce_eager"] = True
    else:
        graphs: dict[str, Any] = {"cudagraph_capture_sizes": capture_sizes(job)}
        given["compilation_config"] = (
            graphs
            if job.compiled
            else graphs
            | {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
            }
        )
    if job.mode == "replay":
        given["additional_config"] = {"replayssm": {"format": job.format, "window": job.window}}
    if job.mode == "vllm-replay":
        given |= {"use_replayssm": True, "replayssm_buffer_len": job.window}
        if job.drafts:
            given["mamba_backend"] = "flashinfer"  # it has no other with drafts
    if job.drafts:
        drafting: dict[str, Any] = {"method": job.method, "num_speculative_tokens": job.drafts}
        if job.method == "ngram":
            drafting |= {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
        if job.acceptance is not None:
            drafting |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": job.acceptance}
        given["speculative_config"] = drafting
    if job.task == "logprobs":
        given["max_logprobs"] = MOST
        if not job.drafts and job.runner != "v1":
            given["enable_trace_replay"] = True
        if job.runner == "v1":
            given["async_scheduling"] = False  # the forced token is chosen by how many were made
    return given | job.engine


def environment(job: Job) -> dict[str, str]:
    """Environment variables of the process. What the user has set wins, but for what a mode needs."""
    ours = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # decoding is greedy
        "PYTHONUNBUFFERED": "1",
    }
    needed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if job.tensor_parallel > 1:
        needed["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # layers of workers are asked for their class
    runner = "v1" if job.mode == "vllm-replay" else job.runner
    if runner is not None:
        needed["VLLM_USE_V2_MODEL_RUNNER"] = "0" if runner == "v1" else "1"
    if job.tuned is not None:
        needed["VLLM_TUNED_CONFIG_FOLDER"] = str(launch_folder(job))
    return ours | dict(os.environ) | needed


def run(job: Job, log: Path, seconds: float) -> dict[str, Any]:
    """Run a job in a process of its own and return its document.

    Args:
        log: gets all that the process prints.
        seconds: it is ended, with those it started, after so long.

    Raises:
        Failed: it ended without a document.
    """
    (document,) = run_all([(job, log)], seconds)
    if isinstance(document, Failed):
        raise document
    return document


def run_all(jobs: Sequence[tuple[Job, Path]], seconds: float) -> Iterator[dict[str, Any] | Failed]:
    """Documents of jobs, each with its log, one after the other; `seconds` as in `run`, for each.

    While one has the GPU the next one's process already starts: it imports vLLM, which takes longer than many a
    measurement, and waits for its turn before it touches the GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        waiting = [(job, log, Path(folder) / str(i)) for i, (job, log) in enumerate(jobs)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for job, log, place in list(waiting):
                while waiting and len(running) < 2:
                    running.append(_start(*waiting.pop(0)))
                (place / "turn").touch()
                try:
                    document = _document(running[0], job, log, place, seconds)
                finally:
                    _end(running.pop(0))
                yield document
        finally:
            for process in running:
                _end(process)


def _start(job: Job, log: Path, place: Path) -> subprocess.Popen[bytes]:
    """The process of a job, which has a new folder for what goes in and out."""
    place.mkdir()
    given = place / "job.json"
    given.write_text(json.dumps(asdict(replace(job, turn=str(place / "turn")))))
    with log.open("wb") as output:
        return subprocess.Popen(
            [*COMMAND, str(given), str(place / "made.json")], env=environment(job), stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _document(
    process: subprocess.Popen[bytes], job: Job, log: Path, place: Path, seconds: float
) -> dict[str, Any] | Failed:
    """What a job's process has made, once it ended."""
    made = place / "made.json"
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return Failed(f"{job.mode} took more than {seconds:g} s and was ended; see {log}.")
    if code or not made.is_file():
        return Failed(f"{job.mode} ended with code {code}: {_last_words(log)} All of it: {log}.")
    return json.loads(made.read_text())


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started (its own group)."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _last_words(log: Path) -> str:
    """The last line that names an error, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line or line.startswith("error:")]
    return (named or lines or ["it said nothing."])[-1]


# --- in the process: the engine ---------------------------------------------------------------------------------------


def start(job: Job) -> tuple[Any, dict[str, Any]]:
    """An engine, and what it turned out to be.

    Raises:
        RuntimeError: mode replay, and none of the model's layers is replayed.
    """
    import torch
    import transformers
    import triton
    import vllm

    make = vllm.LLM  # imports what makes it
    await_turn(job)
    launches = tune(job) if job.kernel is not None and job.mode == "stock" else {}
    given = engine_arguments(job)
    if job.task == "logprobs" and not job.drafts and job.runner == "v1":
        given["logits_processors"] = [_forcing()]
    begun = time.perf_counter()
    llm = make(**given)
    config = llm.llm_engine.vllm_config
    ours = sum(llm.apply_model(_replayed_layers))
    if job.mode == "replay" and not ours:
        raise RuntimeError(
            "the plugin did not take hold: no layer of the model is replayed. Is replayssm installed where vLLM is "
            "(its entry point in vllm.general_plugins), and does VLLM_PLUGINS leave it in?"
        )
    return llm, {
        "gpu": torch.cuda.get_device_name(),
        "versions": {each.__name__: each.__version__ for each in (vllm, torch, triton, transformers)},
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "compiled": int(config.compilation_config.mode) != 0,
        "replayed_layers": ours,
        "start_seconds": time.perf_counter() - begun,
        "launches": {str(rows): launch for rows, launch in launches.items()},
        **_memory(llm),
    }


def await_turn(job: Job) -> None:
    """Until the job's turn has come.

    Raises:
        RuntimeError: who started this process is not there any more.
    """
    while job.turn is not None and not Path(job.turn).exists():
        if not Path(job.turn).parent.exists():
            raise RuntimeError("who started this process has ended.")
        time.sleep(0.05)


def _replayed_layers(model: Any) -> int:
    """How many layers the plugin has taken over. Without its setting its classes are there, and hold nothing."""
    return sum(getattr(module, "replay", None) is not None for module in model.modules())


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _memory(llm: Any) -> dict[str, Any]:
    """Bytes of a request's recurrent states, of a token's keys and values, and how many requests fit."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
    from vllm.v1.kv_cache_interface import MambaSpec

    config, cache = llm.llm_engine.vllm_config, _scheduler(llm).kv_cache_config
    state = token = 0.0
    for group in cache.kv_cache_groups:
        spec, layers = group.kv_cache_spec, len(group.layer_names)
        if isinstance(spec, MambaSpec):
            state += layers * spec.max_memory_usage_bytes(config)
        else:
            token += layers * spec.page_size_bytes / spec.block_size
    return {
        "state_bytes_per_request": state,
        "kv_bytes_per_token": token,
        "tokens_per_request": config.model_config.max_model_len,
        "requests_that_fit": int(get_max_concurrency_for_kv_cache_config(config, cache)),
        "num_gpu_blocks": cache.num_blocks,
    }


def prompts(llm: Any, texts: Sequence[str] | None, count: int) -> list[list[int]]:
    """Token ids of `count` prompts: texts through the model's chat template, or random ids of many lengths."""
    if texts is None:
        source = random.Random(0)
        vocabulary = llm.model_config.get_vocab_size()
        lengths = [RANDOM_TOKENS - (5 * i) % (RANDOM_TOKENS // 2) for i in range(count)]
        return [[source.randrange(10, vocabulary - 10) for _ in range(length)] for length in lengths]
    tokenizer = llm.get_tokenizer()
    found = []
    for i in range(count):
        text = texts[i % len(texts)]
        if getattr(tokenizer, "chat_template", None):
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            found.append(tokenizer.encode(text, add_special_tokens=False))
        else:
            found.append(tokenizer.encode(text))
    return [ids[-TEXT_TOKENS:] for ids in found]


# --- in the process: timing -------------------------------------------------------------------------------------------


def decode(job: Job) -> dict[str, Any]:
    """Time steady decoding: every row runs, none is in prefill, none ends, and rows flush in different steps."""
    llm, found = start(job)
    return found | {"rows": [_steady(llm, job, batch, found["requests_that_fit"]) for batch in job.batches]}


def _steady(llm: Any, job: Job, batch: int, room: int) -> dict[str, Any]:
    """`repeats` times `steps` steps of as many of `batch` rows as fit."""
    engine, rows = llm.llm_engine, min(batch, room)
    if rows < 1:
        raise RuntimeError(f"not one request of {llm.model_config.max_model_len} tokens fits.")
    asked = prompts(llm, job.texts, rows)
    _admit(engine, asked, _greedy(new_tokens(job)), -(-rows // job.window))
    ends, past = set() if job.dummy else _ends(llm), set[str]()
    runs, seconds, graphs = [], [], []
    _run(engine, 2 * job.window, ends, past)  # kernels of flushes are compiled at their first
    for _ in range(job.repeats):
        with _timed_graphs() as events:
            begun = time.perf_counter()
            runs.append(_run(engine, job.steps, ends, past))
            seconds.append(time.perf_counter() - begun)
        graphs.append(_elapsed(events))
    engine.abort_request([str(i) for i in range(rows)])
    for _ in range(4):  # what was queued
        engine.step()
    return {
        "batch": batch,
        "rows": rows,
        "steps": job.steps,
        "seconds": seconds,
        "graph_seconds": graphs,
        "tokens": [sum(tokens for _, tokens in run) for run in runs],
        "steps_with_rows_missing": sum(had < rows for run in runs for had, _ in run),
        "rows_past_their_end": None if job.dummy else len(past) / rows,
        "prompt_tokens": mean(map(len, asked)),
    }


@contextmanager
def _timed_graphs() -> Iterator[list[Any]]:
    """Pairs of events around every CUDA graph that this process replays inside."""
    import torch

    own, events = torch.cuda.CUDAGraph.replay, list[Any]()

    def replay(graph: Any) -> None:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        own(graph)
        after.record()
        events.append((before, after))

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", replay):
        yield events


def _elapsed(events: list[Any]) -> float | None:
    """Seconds that the GPU was between events, all pairs together; None where there are none."""
    if not events:
        return None
    events[-1][1].synchronize()
    return sum(before.elapsed_time(after) for before, after in events) / 1e3


def _greedy(most: int, **more: Any) -> Any:
    """Sampling parameters: the likeliest token, on past the end of the text, new tokens as they come."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, **more
    )


def _ends(llm: Any) -> set[int]:
    end = llm.model_config.hf_text_config.eos_token_id
    return set(end) if isinstance(end, list) else set() if end is None else {end}


def _admit(engine: Any, asked: list[list[int]], parameters: Any, at_once: int) -> None:
    """Requests, some in every step, until all have their first token: so they are not in phase.

    Raises:
        RuntimeError: no further one gets in.
    """
    waiting, idle = list(enumerate(asked)), 0
    started: set[str] = set()
    while len(started) < len(asked):
        for i, ids in waiting[:at_once]:
            engine.add_request(str(i), {"prompt_token_ids": ids}, parameters)
        del waiting[:at_once]
        new = {row.request_id for row in _step(engine) if row.new_token_ids} - started
        started |= new
        idle = 0 if new or waiting else idle + 1
        if idle > 200:
            raise RuntimeError(f"only {len(started)} of {len(asked)} requests run: the others get no memory.")


def _step(engine: Any) -> list[Any]:
    """One step of the engine's core and what it gave every row, without the front end.

    In a server the front end, which makes texts of tokens, is another process and runs beside the next step.
    """
    return engine.engine_core.get_output().outputs


def _run(engine: Any, steps: int, ends: set[int], past: set[str]) -> list[tuple[int, int]]:
    """Rows and tokens of so many steps; calls that only queue a step (asynchronous scheduling) are not counted.

    Requests that got one of the tokens `ends` are added to `past`. What the engine gave is not kept.
    """
    made: list[tuple[int, int]] = []
    idle = 0
    while len(made) < steps:
        rows = _step(engine)
        if rows:
            made.append((len(rows), sum(len(row.new_token_ids) for row in rows)))
            if ends:
                past.update(row.request_id for row in rows if not ends.isdisjoint(row.new_token_ids))
        idle = 0 if rows else idle + 1
        if idle > 200:
            raise RuntimeError("all requests ended while steps were being timed.")
    return made


def tune(job: Job) -> dict[int, dict[str, int]]:
    """The fastest launches of Mamba-2's stock state kernel, by rows; completes the file that vLLM reads."""
    import torch
    from vllm.model_executor.layers.mamba.ops import mamba_ssm
    from vllm.triton_utils import triton

    folder = launch_folder(job)
    assert job.kernel is not None and folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    width = "float16" if job.state == "bfloat16" else job.state  # one file for both
    name = mamba_ssm.get_ssm_config_file_name(job.kernel["V"], job.kernel["K"], width, mamba_ssm.get_ssm_device_name())
    path = folder / name
    known = json.loads(path.read_text()) if path.is_file() else {"triton_version": triton.__version__}
    launches = {}
    for rows in job.batches:
        programs = str(rows * job.kernel["H"])
        if programs not in known:
            tile, warps = _fastest(job, rows, mamba_ssm)
            torch.cuda.empty_cache()
            known[programs] = {"BLOCK_SIZE_M": tile, "num_warps": warps}
        launches[rows] = known[programs]
    path.write_text(json.dumps(known) + "\n")
    return launches


def _fastest(job: Job, rows: int, kernels: Any) -> tuple[int, int]:
    """Tile and warps of the fastest launch, over as many layers as make the L2 cache cold.

    With drafts it is the form that takes 1 + drafts tokens of a row, and writes a state for each.
    """
    import torch

    from replayssm.bench import replay

    assert job.kernel is not None
    H, G, V, K = (job.kernel[name] for name in "HGVK")
    dtype, T = getattr(torch, job.state), 1 + job.drafts
    layers = max(1, min(24, -(-400_000_000 // (rows * H * V * K * dtype.itemsize))))
    with torch.device("cuda"):
        states = torch.zeros(layers, 1 + rows * T, H, V, K, dtype=dtype)
        x = torch.randn(rows * T, H, V, dtype=torch.bfloat16)
        dt = torch.randn(rows * T, H, 1, dtype=torch.bfloat16).expand(-1, -1, V)
        B, C = torch.randn(2, rows * T, G, K, dtype=torch.bfloat16)
        A, (D, bias) = -torch.rand(H, 1, 1).expand(H, V, K), torch.rand(2, H, 1).expand(2, H, V)
        slots = torch.arange(1, 1 + rows * T, dtype=torch.int32).view(rows, T)
        drafted = {
            "num_accepted_tokens": torch.full((rows,), T, dtype=torch.int32),
            "cu_seqlens": torch.arange(0, rows * T + 1, T, dtype=torch.int32),
        }
        out = torch.empty_like(x)

    def step() -> None:
        for state in states:
            kernels.selective_state_update(
                state, x, dt, A, B, C, D, bias, dt_softplus=True, state_batch_indices=slots,
                dst_state_batch_indices=slots, out=out, **(drafted if T > 1 else {}),
            )  # fmt: skip

    times = {}
    for launch in product((4, 8, 16, 32, 64), (1, 2, 4, 8)):
        with kernels.override_ssm_config(launch):
            times[launch] = min(replay(step, 2, 8))
    return min(times, key=lambda launch: times[launch])


# --- in the process: forced tokens ------------------------------------------------------------------------------------


def logprobs(job: Job) -> dict[str, Any]:
    """Decode the same tokens in several ways, one token a step, and say the log-probabilities of every position.

    At most `seats` requests run at once: the others wait, take over rows that became free, and are prefilled beside
    running ones. `ways`: "free" decodes greedily, which makes the tokens; "together" is fed those tokens, "alone" too,
    one request at a time; "prefill" takes them as prompts. Tokens of an earlier process come in `sequences` ([prompt,
    new tokens] of every request).
    """
    llm, found = start(job)
    texts = job.sequences or [[ids, []] for ids in prompts(llm, job.texts, 2 * job.seats)]
    made = {}
    for way in job.ways:
        if way == "prefill":
            made[way] = _scored(llm, texts)
            continue
        made[way] = _told(llm, job, texts, 1 if way == "alone" else job.seats, forced=way != "free")
        if way == "free":
            texts = [[ids, row["tokens"]] for (ids, _), row in zip(texts, made[way], strict=True)]
    return found | {"sequences": texts, "ways": made}


def _told(llm: Any, job: Job, texts: list[list[list[int]]], seats: int, forced: bool) -> list[dict[str, Any]]:
    """Tokens and log-probabilities of every request; two get in at every step, `seats` are in at most."""
    engine = llm.llm_engine
    rows: list[dict[str, Any]] = [{"tokens": [], "logprobs": []} for _ in texts]
    waiting, running = list(enumerate(texts)), 0
    while waiting or running:
        for _ in range(min(2, seats - running, len(waiting))):
            i, (ids, new) = waiting.pop(0)
            more: dict[str, Any] = {"logprobs": MOST}
            if forced:
                more |= {"extra_args": {FORCED: new}} if job.runner == "v1" else {"trace_decode_token_ids": new}
            engine.add_request(str(i), {"prompt_token_ids": ids}, _greedy(len(new) if forced else job.steps, **more))
            running += 1
        for output in engine.step():
            part, row = output.outputs[0], rows[int(output.request_id)]
            row["tokens"] += list(part.token_ids)
            row["logprobs"] += map(_pairs, part.logprobs or [])
            running -= output.finished
    return rows


def _scored(llm: Any, texts: list[list[list[int]]]) -> list[dict[str, Any]]:
    """The same of the new tokens by a prefill: other kernels of the same model, and no state that a decode wrote."""
    whole = [{"prompt_token_ids": [*ids, *new]} for ids, new in texts]
    told = llm.generate(whole, _greedy(1, prompt_logprobs=MOST), use_tqdm=False)
    return [
        {"tokens": new, "logprobs": [_pairs(at) for at in row.prompt_logprobs[len(ids) :]]}
        for (ids, new), row in zip(texts, told, strict=True)
    ]


def _pairs(at: dict[int, Any]) -> list[list[Any]]:
    return [[token, told.logprob] for token, told in at.items()]


FORCED = "replayssm_forced_tokens"


def _forcing() -> type:
    """Model runner V1's way to force tokens (V2 has `trace_decode_token_ids`): all logits but one become -inf.

    Log-probabilities are of the logits before that (logprobs_mode "raw_logprobs", vLLM's default).
    """
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forcing(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            tokens = (params.extra_args or {}).get(FORCED)
            if tokens is None:
                return None

            def force(made: list[int], logits: Any) -> Any:
                logit = logits[tokens[len(made)]].clone()
                logits.fill_(float("-inf"))
                logits[tokens[len(made)]] = logit
                return logits

            return force

    return Forcing


def main(given: str, made: str) -> None:
    """Do the job in a file and write its document; the process ends here, whatever threads are left."""
    raw = json.loads(Path(given).read_text())
    job = Job(**raw | {name: tuple(raw[name]) for name in ("batches", "ways")})
    document = {"decode": decode, "logprobs": logprobs}[job.task](job)
    Path(made).write_text(json.dumps(document))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

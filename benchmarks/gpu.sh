#!/usr/bin/env bash
# What results/ holds of a GPU, measured anew:   [OUT=results] [COMMIT=...] [SITE=folder] bash benchmarks/gpu.sh TASK...
#
#   compile     kernels of all rows below, 14 processes at once (2 minutes; Triton keeps them in ~/.triton);
#               benchmarks/precompile.py does it without a GPU
#   tests       tests marked gpu, 6 processes at once                                        -> gpu_tests.txt
#   launches    launch choices, one field after the other                                    -> launches.jsonl
#   parts       read, carry and flush of a step, each by itself, of one token and of five     -> parts.jsonl
#   kernels     plain decoding against the public kernels (needs vLLM and fla-core)          -> kernels.jsonl
#   formats     the other storage formats, 256 rows                                          -> kernels.jsonl
#   drafts      4 drafts + 1, 3.5 accepted, windows of 16 and 32; a tree of 8 nodes          -> kernels.jsonl
#   eval        accuracy: 1,024 paired problems alone and late in a stream; drift            -> accuracy-*.jsonl
#   vllm-tests  the plugin beside vLLM's own layers, and whole models                        -> vllm_tests.txt
#   vllm-check  log-probabilities of the bundled models with and without the plugin          -> check-*.txt
#   vllm-smoke  four layers, eight rows, every mode: minutes before hours                    -> e2e-smoke.jsonl
#   vllm        whole models in vLLM, sizes without weights (NANO, QWEN: folders with a config.json) -> e2e.jsonl
#   vllm-drafts the same with drafts, and Nemotron-3-Super at a cut depth                    -> e2e.jsonl
#
# SITE is where vLLM lies if it is not installed; COMMIT is written into rows where there is no git. Rows are appended.
set -uo pipefail
out=${OUT:-results} commit=(--commit "${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}")
export PYTHONPATH=src:${SITE:-}:${PYTHONPATH:-} OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1 \
  VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 HF_HUB_OFFLINE=1 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo \
  NCCL_SOCKET_IFNAME=lo PYTHONUNBUFFERED=1 COLUMNS=150
mkdir -p "$out"
narrow=fp8,int8,fp4,mxfp4,fp32+fp8,fp16+fp4,fp16+fp4/residual,fp8+fp4/residual,fp16+fp8/residual
drafts=(--tokens 5 --accepted 3.5)

bench() { python3 -m replayssm.bench "$@"; }
rows() { bench kernels --launches results/baseline-launches-h200.json "${commit[@]}" --out "$out/kernels.jsonl" "$@"; }
whole() { # whole SCRIPT options...: a model in vLLM, each mode in a process of its own
  python3 "benchmarks/replayssm/e2e_$1.py" --no-compile --engine '{"attention_backend": "FLASH_ATTN"}' --tuned "$out/tuned" "${commit[@]}" "${@:2}"
}
at_once() { # at_once N NAME command...: the command N times beside itself, with "I/N" at its end
  local n=$1 name=$2 i
  shift 2
  for i in $(seq 0 $((n - 1))); do "$@" "$i/$n" >"$out/$name-$i.log" 2>&1 & done
  wait
}

for task in "$@"; do
  date
  case $task in
  compile)
    at_once 14 compile bench kernels --only-compile
    at_once 14 compile-formats bench kernels --case mamba2-h64 --case qwen3.5-4b --batch 256 --format "$narrow" --only-compile
    at_once 14 compile-drafts bench kernels "${drafts[@]}" --only-compile ;;
  tests)
    tests() { python3 -m pytest -q -rA "${@:2}" >"$out/test-$1.log" 2>&1 & }
    tests formats tests/test_formats_kernel.py
    tests device tests/test_device.py
    for name in mamba2 gdn kda; do tests $name tests/test_gpu.py -k $name; done
    tests others tests/test_gpu.py -k "not (mamba2 or gdn or kda)"
    python3 -m replayssm check >"$out/test-check.log" 2>&1 &
    wait
    tail -n 4 "$out"/test-*.log | tee "$out/gpu_tests.txt" ;;
  launches)
    at_once 14 compile-launches bench launches --case mamba2-h64 --case qwen3.5-4b --only-compile
    bench launches --case mamba2-h64 --case qwen3.5-4b "${commit[@]}" --out "$out/launches.jsonl" --seconds 240 ;;
  parts)
    bench parts --format fp32,split16,bf16 "${commit[@]}" --out "$out/parts.jsonl" --seconds 120
    bench parts --case nano-4b --case super --case qwen3.5-4b --case qwen3.5-122b "${drafts[@]}" "${commit[@]}" --out "$out/parts.jsonl" ;;
  kernels)
    rows --seconds 400
    rows --case super --case qwen3.5-122b --batch 512 --seconds 60 ;;
  formats) rows --case mamba2-h64 --case qwen3.5-4b --batch 256 --format "$narrow" --seconds 240 ;;
  drafts)
    for window in 16 32; do
      bench kernels "${commit[@]}" --out "$out/kernels.jsonl" "${drafts[@]}" --window $window --batch 1,256,512 --format fp32,split16 --seconds 400
    done
    bench kernels "${commit[@]}" --out "$out/kernels.jsonl" --tokens 8 --accepted 3.5 --tree --batch 32,256 --format fp32,split16 --seconds 200 ;;
  eval)
    for model in nemotron-h-gsm qwen3.5-gsm; do
      for formats in "fp32 fp4 fp16+fp4" "fp8+fp4/residual fp16+fp4/residual" "mxfp4 fp8+fp4" "int8 fp8" "split16 fp32+fp4" "fp16+fp8/residual fp32+fp8"; do
        name=$model-${formats%% *}
        for measure in "drift" "task --late 15,0 --batch 512"; do
          # shellcheck disable=SC2086
          python3 -m replayssm eval -m models/$model --device cuda "${commit[@]}" --measure $measure --seconds 480 \
            $(printf -- '-f %s ' $formats) --out "$out/accuracy-${name//\//-}-${measure%% *}.jsonl" >"$out/eval-${name//\//-}-${measure%% *}.log" 2>&1 &
        done
      done
    done
    wait ;;
  vllm-tests)
    python3 -m pytest -q -rA -n 8 --dist worksteal tests/integrations/test_vllm_engine.py tests/integrations/test_vllm_models.py 2>&1 |
      tee "$out/vllm_tests.txt" | tail -60 ;;
  vllm-check) # at once: each takes a small part of the GPU
    for model in nemotron-h-gsm qwen3.5-gsm; do
      for options in "--format fp32,split16" "--format fp32 --drafts 4" "--format fp32 --runner v1"; do
        # shellcheck disable=SC2086
        python3 -m replayssm check --vllm models/$model --tokens 256 $options \
          --engine '{"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2147483648}' >"$out/check-$model-${options##* }.txt" 2>&1 &
      done
    done
    wait
    tail -n 30 "$out"/check-*.txt ;;
  vllm-smoke)
    small=(--layers 4 --batch-size 8 --steps 64 --repeats 1 --out "$out/e2e-smoke.jsonl")
    whole decode_speedup --model-id "$NANO" --modes stock,replay,vllm-replay "${small[@]}"
    whole decode_speedup --model-id "$QWEN" "${small[@]}"
    whole spec_decode_throughput --model-id "$QWEN" --acceptance-length 3 --format fp32 "${small[@]}"
    whole spec_decode_throughput --model-id "$NANO" --acceptance-length 3 --draft-method ngram --format fp32 "${small[@]}" ;;
  vllm)
    for folder in "$NANO" "$QWEN"; do
      whole decode_speedup --model-id "$folder" --dummy-weights --batch-size 1,256,512 --format fp32,split16,fp32+fp8 --out "$out/e2e.jsonl"
    done
    whole decode_speedup --model-id "$NANO" --dummy-weights --batch-size 256 --runner v1 --modes stock,replay,vllm-replay --out "$out/e2e.jsonl" ;;
  vllm-drafts)
    drafted=(--batch-size 512 --acceptance-length 3 --format fp32,split16 --out "$out/e2e.jsonl")
    whole spec_decode_throughput --model-id "$QWEN" --dummy-weights "${drafted[@]}"
    whole spec_decode_throughput --model-id "$NANO" --dummy-weights --draft-method ngram "${drafted[@]}"
    whole spec_decode_throughput --model-id nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4 --layers 11 "${drafted[@]}" ;;
  *) sed -n '2,21p' "$0"; exit 2 ;;
  esac
done

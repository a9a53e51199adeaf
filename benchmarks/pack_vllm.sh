#!/usr/bin/env bash
# What `bench kernels` needs of vLLM (replayssm.bench.baselines), for a machine without internet:
#   bash benchmarks/pack_vllm.sh FOLDER OUT.tar.xz
# FOLDER is a site-packages with vLLM 0.33. In it: vLLM's Python, what importing it takes, and the library that holds
# torch.ops._C.fused_gdn_decode_post_conv_mtp. Not in it: FlashAttention, MoE and other extensions, servers, models' data.
# There: tar xJf OUT.tar.xz -C SITE, and SITE on PYTHONPATH.
set -euo pipefail
from=$1 out=$(realpath -m "$2")
mkdir -p "$(dirname "$out")"
list=$(mktemp) top=$(mktemp -d)
trap 'rm -rf "$list" "$top"' EXIT
cd "$from"
find vllm -type f \( -name '*.py' -o -name '*.json' -o -name '_C_stable_libtorch.abi3.so' \) \
  ! -path '*/configs/E=*' ! -path '*/fused_moe/configs/*' ! -path '*/quantization/utils/configs/*' >"$list"
for name in vllm-*.dist-info annotated_types cachetools cbor2 compressed_tensors distro fastapi ijson ijson.libs llguidance loguru msgspec \
  openai openai_harmony orjson partial_json_parser pybase64 pydantic pydantic_core pyzmq.libs sniffio starlette typing_extensions.py \
  typing_inspection vllm_torch211_shim.py xgrammar zmq pydantic-*.dist-info pydantic_core-*.dist-info compressed_tensors-*.dist-info \
  llguidance* openai_harmony* orjson* msgspec* pyzmq-*.dist-info cbor2-*.dist-info; do
  if [ -e "$name" ]; then find "$name" -type f ! -name '*.pyc' >>"$list"; fi
done
sort -u -o "$list" "$list"
# a torch older than vLLM asks for: gaps are filled before anything of vLLM is imported
if [ -e vllm_torch211_shim.py ]; then echo 'import vllm_torch211_shim' >"$top/sitecustomize.py"; fi
# KDA's step lies in a model's package, which imports attention: nothing of it is called
mkdir -p "$top/vllm/vllm_flash_attn"
printf 'def __getattr__(name):\n    return None\n' >"$top/vllm/vllm_flash_attn/__init__.py"
tar cf - -T "$list" -C "$top" . | xz -6 -T1 >"$out"
ls -l "$out"

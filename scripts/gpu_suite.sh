#!/usr/bin/env bash
# The GPU suite: attention bandwidth, forward latencies, tokens, peers, whole runs, tests. Fetches
# nothing.
#
#   scripts/gpu_suite.sh quick                 # in 8 minutes: what works, tokens, times, peers
#   scripts/gpu_suite.sh again PART...         # in 3 minutes: parts of `quick` once more
#   scripts/gpu_suite.sh [STAGE...] [--device cuda|cpu] [--tiny] [--seconds N]
#
# Without a STAGE all stages run, the most important first: attention llama31 tokens peers demo stages
# tests. Each stage runs in a process of its own for at most 10 minutes and writes $OUT/STAGE.json
# (default of OUT: results/gpu) and $OUT/summary.md, of all that is there, even if other stages fail.
# A stage that runs again keeps the cells that were measured and measures the missing ones, so a long
# stage can be run repeatedly. FROM names a folder with the files of earlier calls, which are copied
# to $OUT first, where $OUT is empty at each call. PYTHON names the interpreter; the default is the
# first one with a torch for the device and the packages that the suite needs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out=${OUT:-results/gpu}
all=(attention llama31 tokens peers demo stages tests summary)
more=(hybrid drafts tiles kernels) # by name alone
stages=() options=() device=cuda
while [ $# -gt 0 ]; do
    case $1 in
    --device) device=${2-} && options+=("$1" "$device") && shift ;;
    --seconds) options+=("$1" "${2-}") && shift ;;
    --out) echo "gpu_suite.sh: --out is not a flag here; set the variable OUT" >&2 && exit 2 ;;
    -*) options+=("$1") ;;
    *) stages+=("$1") ;;
    esac
    shift
done
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]}")
parts=()
case ${stages[0]} in
quick | again) parts=("${stages[@]:1}") && stages=("${stages[0]}") && all+=(quick again) ;;
esac
if [ -n "${FROM-}" ] && [ ! -d "$FROM" ]; then
    echo "gpu_suite.sh: FROM $FROM is no folder; give the one with the files of earlier calls" >&2
    exit 2
fi
for stage in "${stages[@]}"; do
    case " ${all[*]} ${more[*]} " in
    *" $stage "*) ;;
    *) echo "gpu_suite.sh: STAGE $stage is not known; choose from ${all[*]}" >&2 && exit 2 ;;
    esac
done

# Prints the installed versions to stderr, and to stdout whether the package's metadata is there.
# Exits with 3 if the device is missing.
probe='
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
import torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit(3)
def shown(name):
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} missing"
optional = ("triton", "transformers", "flash_attn", "nvidia-ml-py")
print("torch", torch.__version__, "CUDA", torch.version.cuda, *map(shown, optional), file=sys.stderr)
needed = "numpy scipy safetensors tokenizers sentencepiece rich pydantic"
missing = [name for name in needed.split() if not find_spec(name)]
if missing:
    sys.exit("gpu_suite.sh: missing packages: " + ", ".join(missing))
print(shown("magicdec"))
'
export PYTHONPATH="$PWD:$PWD/scripts/dev${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python= no_gpu=
for candidate in ${PYTHON:-.venv/bin/python python3 python}; do
    command -v "$candidate" >/dev/null || continue
    package=$("$candidate" -c "$probe" "$device") && python=$candidate && break
    [ $? -ne 3 ] || no_gpu=$candidate
done
if [ -z "$python" ] && [ -n "$no_gpu" ]; then
    echo "gpu_suite.sh: torch of $no_gpu finds no GPU, or no driver; --device cpu --tiny rehearses" >&2
    exit 2
fi
if [ -z "$python" ]; then
    echo "gpu_suite.sh: no python has the packages for --device $device; set PYTHON" >&2
    exit 2
fi
# If the package is not installed, its metadata is made from pyproject.toml.
if [ "$package" = "magicdec missing" ]; then
    mkdir -p build/gpu_site
    "$python" -c "from setuptools import build_meta as b
b.prepare_metadata_for_build_wheel('build/gpu_site')" >/dev/null || exit 1
    export PYTHONPATH="$PYTHONPATH:$PWD/build/gpu_site"
fi

[ "$device" != cpu ] || export TRITON_INTERPRET=1 # before anything imports Triton
mkdir -p "$out" || exit 2
if [ -n "${FROM-}" ]; then
    for earlier in "$FROM"/*.json; do
        [ ! -e "$earlier" ] || [ -e "$out/${earlier##*/}" ] || cp "$earlier" "$out" || exit 1
    done
fi
failed=()
for stage in "${stages[@]}"; do
    # The stage ends with this shell, and by itself after 595 s.
    GPU_SUITE_PARENT=$$ "$python" scripts/dev/gpu_suite.py "$stage" ${parts[@]+"${parts[@]}"} \
        --out "$out" ${options[@]+"${options[@]}"}
    status=$?
    [ $status -ne 2 ] || exit 2
    [ $status -eq 0 ] || failed+=("$stage")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu_suite.sh: not complete: ${failed[*]}" >&2
    exit 1
fi

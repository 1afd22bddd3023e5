#!/bin/bash
# Everything that needs a GPU, in one call of under ten minutes: benchmarks/gpu_check.sh OUT_FOLDER
#
# Builds the package with its CUDA kernels for the GPU at hand, runs the tests that use a GPU, runs a selection of them
# under compute-sanitizer, and benchmarks. Downloads nothing: PyTorch for CUDA, nvcc, Triton and the test requirements
# must be installed; machine.log names those that are not. Every stage has a time limit and a log of its own in
# OUT_FOLDER, and a failed one does not stop the next; summary.txt says how each ended. The exit code is the number of
# stages that failed.
set -u
cd "$(dirname "$0")/.." || exit 1
[ $# -eq 1 ] || { echo "usage: $0 OUT_FOLDER" >&2; exit 2; }
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd)
failed=0
: > "$out/summary.txt"

# stage NAME SECONDS COMMAND...; the limit is an interrupt, which pytest answers with the failures up to there
stage() {
  local name=$1 seconds=$2 start=$SECONDS
  shift 2
  timeout --signal=INT --kill-after=10 "$seconds" "$@" > "$out/$name.log" 2>&1
  local code=$?
  [ $code -eq 0 ] || failed=$((failed + 1))
  printf '%-12s exit %3d  %4d s of %4d: %s\n' "$name" $code $((SECONDS - start)) "$seconds" \
    "$(grep -v '^ *$' "$out/$name.log" | tail -n 1 | cut -c1-160)" | tee -a "$out/summary.txt"
}

machine() {
  nvidia-smi
  nvcc --version
  python -m pip list 2> /dev/null | grep -iE '^(torch|triton|timm|torchvision|numpy|pytest) '
  local module
  for module in expecttest hypothesis xdist timm torchvision sklearn tyro rich numpy pybind11 ninja setuptools wheel; do
    python -c "import $module" 2> /dev/null || echo "missing: $module"
  done
  git log -1 --format='commit %H'
  python -c 'import torch; print(torch.cuda.get_device_name(), torch.version.cuda)'
}

build() {
  local capability
  capability=$(python -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())') &&
    FUSEDTRAIN_CUDA=1 FUSEDTRAIN_REQUIRE_EXT=1 TORCH_CUDA_ARCH_LIST=$capability \
      python -m pip install --no-build-isolation --no-deps . &&
    cd / && python -m fusedtrain info  # away from the source tree: the installed package
}

# Verbose: what has passed and failed is in the log, whatever ends the run. Two cores are left to what the tests start.
tests() {
  local limit=()
  python -c 'import pytest_timeout' 2> /dev/null && limit=(--timeout 60)
  pytest -v -p no:cacheprovider --continue-on-collection-errors --dist=worksteal \
    -n "$(($(nproc) > 2 ? $(nproc) - 2 : 1))" "${limit[@]}" tests -k "$1"
}

# The kernels' paths under the sanitizer: each op, both layouts but none that is copied first, three dtypes; forward and
# backward. Ours alone: PyTorch's would take most of the time. Without the caching allocator, in whose large blocks no
# access is out of bounds.
sanitize() {
  local images="(odd or long or vectors or one_pixel) and not (sliced or transposed or expanded or float64)"
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --kernel-name kns=fusedtrain --error-exitcode 9 \
    pytest -n0 -v -p no:cacheprovider tests/test_global_response_norm.py \
    tests/test_channel_pool.py tests/test_channel_scale.py \
    tests/test_squeeze_excite.py tests/test_depthwise_conv2d.py tests/test_batch_norm_act.py \
    tests/test_depthwise_bn_act_se.py tests/test_optimizer_step.py tests/test_grad_norm.py \
    -k "cuda-cuda and (large_mean or any_list or skipped and change0 or as_good_as_torch and $images)"
}

export -f machine build tests sanitize
export FUSEDTRAIN_REQUIRE_EXT=1

stage machine 25 bash -c machine
stage build 130 bash -c build
stage tests 120 bash -c 'tests "(cuda or graphs or gpu) and not (cuda-reference or cuda-triton or emu or nvcc or csrc)"'
stage triton 90 bash -c 'tests cuda-triton'
stage memcheck 45 bash -c 'sanitize memcheck'
stage racecheck 30 bash -c 'sanitize racecheck'
# Every case beside PyTorch's eager forms first, and whole steps; then beside compiled ones too, as far as compiling them
# leaves time.
benchmarks=(python benchmarks/run.py --device cuda --quick --budget 0.1)
stage benchmarks 50 "${benchmarks[@]}" --without compile --output "$out"
stage steps 70 "${benchmarks[@]}" --models efficientnet_b0 --batch 256 --dtype bfloat16 --output "$out"
stage compiled 30 "${benchmarks[@]}" --output "$out/compiled"
exit $failed

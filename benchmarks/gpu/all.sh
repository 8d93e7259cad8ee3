#!/usr/bin/env bash
# What needs a GPU: the build, the tests, the measurements. `all.sh` does everything, `all.sh build tests launch` these
# parts, in this order:
#   build        the extension, in this folder                      transfers    two processes' messages
#   tests        tests/gpu in one process                           copies       copies beside a matrix product
#   processes    tests/gpu in 2 and 4 processes                     predicted    makespans
#   launch       host time, recorded steps                          weight_grad  the fused weight gradient
#   overlap      F under B
# A part that fails or takes too long leaves the others to run. Each writes a file into $RESULTS as it goes.
#   PYTHON   an interpreter that has a torch for CUDA, setuptools, ninja, pytest and pytest-timeout (python3); with
#            pytest-xdist, a test that hangs or crashes is the only one that is lost
#   RESULTS  where the files go (benchmarks/gpu/results)
#   LIMIT    seconds for everything; what does not fit is cut short, or left out (none)
#   COMMIT   what is tested, where git cannot tell
#   OPTIONS  for the scripts that measure, for example --markdown
#   TESTS    which tests, an expression as for pytest's -k, for example "1f1b or killed"
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
python=${PYTHON:-python3}
results=${RESULTS:-benchmarks/gpu/results}
options=${OPTIONS:-}
all="build tests processes launch overlap transfers copies predicted weight_grad"
parts=${*:-$all}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FASTPIPE_BUILD_EXT=1 FASTPIPE_REQUIRE_NATIVE=1
SECONDS=0
summary=()

machine() {
    date -u '+%F %T UTC'
    echo "commit ${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"
    nvidia-smi
    "$python" - <<'END'
import os, platform, sys, torch
from torch.utils.cpp_extension import CUDA_HOME
print("python", platform.python_version(), sys.executable, "cores", len(os.sched_getaffinity(0)), platform.platform())
print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(), "CUDA_HOME", CUDA_HOME)
for i in range(torch.cuda.device_count()):
    print("device", i, torch.cuda.get_device_properties(i), "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
END
    command -v nvcc && nvcc --version | tail -2
    grep -m1 'model name' /proc/cpuinfo
    free -g | head -2
}

# part PATIENCE COMMAND...: no longer than that, nor than what is left of LIMIT. An interrupt lets tests end what they began.
part() {
    local name=$1 patience=$2 began=$SECONDS status
    shift 2
    case " $parts " in *" $name "*) ;; *) return 0 ;; esac
    if [ -n "${LIMIT:-}" ] && [ $((LIMIT - SECONDS - 15)) -lt "$patience" ]; then patience=$((LIMIT - SECONDS - 15)); fi
    if [ "$patience" -lt 10 ]; then
        summary+=("$name: left out, no time is left")
        return 0
    fi
    printf '== %s (at most %d s)\n' "$name" "$patience"
    timeout --signal=INT --kill-after=10 "$patience" "$@" 2>&1 | tee "$results/$name.txt"
    status=$?
    case $status in 0) what=done ;; 124 | 137) what="cut short" ;; *) what="FAILED (exit status $status)" ;; esac
    summary+=("$name: $what, $((SECONDS - began)) s")
    return "$status"
}

for name in $parts; do
    case " $all " in *" $name "*) ;; *)
        echo "all.sh: there is no part $name; there are: $all" >&2
        exit 2
        ;;
    esac
done
mkdir -p "$results" || exit 1
machine 2>&1 | tee "$results/machine.txt"
part build 300 "$python" setup.py --quiet build_ext --inplace
if ! "$python" - <<'END'; then
from fastpipe.runtime import native

runtime = native.load()
print(native.native_status(), flush=True)
raise SystemExit(not (runtime and runtime.has_cuda))
END
    echo "there is no extension with CUDA here, so nothing is tested or measured" | tee -a "$results/machine.txt"
    exit 1
fi

worker=()
if "$python" -c 'import xdist' 2>/dev/null; then worker=(-n 1 --max-worker-restart 20); fi
pytest=("$python" -m pytest -m gpu -v --durations=5 -p no:cacheprovider "${worker[@]}" ${TESTS:+-k "$TESTS"})
failed=0
# shellcheck disable=SC2086 # options are words
{
    part tests 240 "${pytest[@]}" --timeout 90 tests/gpu/test_driver.py tests/gpu/test_one_process.py || failed=1
    part processes 480 "${pytest[@]}" tests/gpu/test_processes.py || failed=1
    part launch 120 "$python" benchmarks/gpu/launch.py $options || failed=1
    part overlap 240 "$python" benchmarks/gpu/overlap.py --streams $options || failed=1
    part transfers 240 "$python" -m torch.distributed.run --nproc-per-node 2 benchmarks/gpu/transfers.py $options || failed=1
    part copies 120 "$python" benchmarks/gpu/copies.py $options || failed=1
    part predicted 120 "$python" benchmarks/gpu/predicted.py $options || failed=1
    part weight_grad 90 "$python" benchmarks/gpu/weight_grad.py $options || failed=1
}
echo "== in all $SECONDS s"
printf '%s\n' "${summary[@]}" | tee "$results/summary.txt"
exit "$failed"

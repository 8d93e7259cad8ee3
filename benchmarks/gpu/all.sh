#!/usr/bin/env bash
# Everything that needs a GPU, in one command: the build, the tests, the measurements. Results go into benchmarks/gpu/results.
# PYTHON names an interpreter that has a torch for CUDA, setuptools, ninja and pytest with pytest-timeout.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
results=benchmarks/gpu/results
mkdir -p "$results"
FASTPIPE_BUILD_EXT=1 "$python" setup.py --quiet build_ext --inplace || exit 1
export PYTHONPATH=$PWD
nvidia-smi >"$results/machine.txt" 2>&1
"$python" -m pytest -m gpu tests/gpu 2>&1 | tee "$results/tests.txt"
tests=$?
for script in launch overlap predicted weight_grad; do
    "$python" "benchmarks/gpu/$script.py" 2>&1 | tee "$results/$script.txt"
done
"$python" -m torch.distributed.run --nproc-per-node 2 benchmarks/gpu/transfers.py 2>&1 | tee "$results/transfers.txt"
exit "$tests"

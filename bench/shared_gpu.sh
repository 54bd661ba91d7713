#!/usr/bin/env bash
# Runs a command whose ranks share one GPU: for checks of what is right, never of what is fast.
#   bench/shared_gpu.sh COMMAND...      such as  bench/shared_gpu.sh bench/two_gpus.sh split OUT
# With MPS=1 behind a multi-process service of its own, so that kernels of several processes run at
# once, each on its share of the multiprocessors (SHARES processes); else they take turns.
set -u
export SPLITWAVE_BENCH_DEVICES=${SPLITWAVE_BENCH_DEVICES:-0 0}
export NCCL_MULTI_RANK_GPU_ENABLE=1 # NCCL 2.30 and later
if [ "${MPS:-0}" = 1 ]; then
  folder=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
  export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / ${SHARES:-2}))
  nvidia-cuda-mps-control -d || exit 1
  trap 'echo "quit -t 3" | timeout 10 nvidia-cuda-mps-control; rm -rf "$folder"' EXIT
fi
"$@"

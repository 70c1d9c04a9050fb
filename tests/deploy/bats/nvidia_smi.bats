#!/usr/bin/env bats
# scripts/gpu_check on a machine whose GPUs are a stand-in for nvidia-smi, and whose builds are one for CMake.
load stubs

machine() {
  mkdir -p "$work/project/scripts"
  cp "$root/scripts/gpu_check" "$work/project/scripts/"
  printf '#!/bin/sh\necho "export FROM_CUDA=1"\n' >"$work/project/scripts/cuda_environment"
  chmod +x "$work/project/scripts/cuda_environment"
  stub cmake <<<'exit "${CMAKE_STATUS:-0}"'
  stub nvidia-smi <<'END'
[ -n "$GPU" ] || { echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver." >&2; exit 9; }
case "$*" in
  *=index*) printf '0\n1\n' ;;
  *=name*) printf '%s\n%s\n' "$GPU" "$GPU" ;;
  *=compute_cap*) printf '%s\n%s\n' "$CAPABILITY" "$CAPABILITY" ;;
  *) exit 2 ;;
esac
END
}

@test "gpu_check: builds machine code for the GPUs that are there" {
  machine
  GPU="NVIDIA B200" CAPABILITY=10.0 run "$work/project/scripts/gpu_check" "$work/out" build
  [ "$status" -eq 0 ]
  [[ $output =~ "2 GPUs: "\ *"2 NVIDIA B200;" ]]
  called "-DCMAKE_CUDA_ARCHITECTURES=100a-real"
  GPU="NVIDIA H200" CAPABILITY=9.0 run "$work/project/scripts/gpu_check" "$work/out" build
  called "-DCMAKE_CUDA_ARCHITECTURES=90a-real"
}

@test "gpu_check: a step that fails is said, and counts" {
  machine
  GPU="NVIDIA B200" CAPABILITY=10.0 CMAKE_STATUS=3 run "$work/project/scripts/gpu_check" "$work/out" build
  [ "$status" -eq 1 ]
  has "FAILED (3)"
}

@test "gpu_check: no GPU, no driver" {
  machine
  GPU="" run "$work/project/scripts/gpu_check" "$work/out" build
  has "0 GPUs:"
}

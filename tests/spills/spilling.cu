// A kernel that cannot live in registers, for the test of the spill check.
__global__ void spilling(int* values, int index) {
  int local[2048];
  for (int i = 0; i < 2048; ++i) local[i] = values[i] + local[(i * 7) & index];
  values[threadIdx.x] = local[values[index] & 2047];
}

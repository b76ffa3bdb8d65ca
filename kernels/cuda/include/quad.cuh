// The four lanes that share the rows of an accumulator.
#pragma once
#include "types.cuh"

// A 4 x 4 transposition over the quad: lane t has word i of lane i's, and ends with the words of column block t.
MLA_DEVICE void transpose_quad(uint32_t (&a)[4]) {
  const bool odd = tid_x() & 1, high = tid_x() & 2;
  uint32_t x = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1), y = __shfl_xor_sync(~0u, odd ? a[2] : a[3], 1);
  if (odd)
    a[0] = x, a[2] = y;
  else
    a[1] = x, a[3] = y;
  x = __shfl_xor_sync(~0u, high ? a[0] : a[2], 2);
  y = __shfl_xor_sync(~0u, high ? a[1] : a[3], 2);
  if (high)
    a[0] = x, a[1] = y;
  else
    a[2] = x, a[3] = y;
}

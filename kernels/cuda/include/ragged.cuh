// Rows of a ragged batch: which sequence a row belongs to.
#pragma once
#include "types.cuh"

// The s in [0, count) with offsets[s] <= row < offsets[s+1]; offsets [count+1] are ordered, offsets[0] <= row < offsets[count].
MLA_DEVICE int sequence_of_row(const int* __restrict__ offsets, int count, int row) {
  int low = 0;
  while (count > 1) {  // offsets[low] <= row < offsets[low + count]
    const int half = count / 2;
    if (row >= offsets[low + half])
      low += half, count -= half;
    else
      count = half;
  }
  return low;
}

// Rows of a ragged batch: which sequence a row belongs to.
#pragma once
#include "types.hpp"

// The s in [0, count) with first(s) <= row < first(s + 1), by bisection; `first` does not decrease, first(0) <= row <
// first(count).
template <typename First> MLA_DEVICE int sequence_of(First first, int count, int row) {
  int low = 0;
  while (count > 1) {
    const int half = count / 2;
    if (row >= first(low + half))
      low += half, count -= half;
    else
      count = half;
  }
  return low;
}

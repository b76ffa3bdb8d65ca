// Where a token of the paged cache lies. Offsets are 64-bit bytes; a page table is read only where a sequence has
// tokens. The including file is compiled with MLA_PAGE_SIZE defined.
#pragma once
#include "types.hpp"

// Page ids of the batch: [B, cols] with a row stride, or the indptr/indices form.
struct PageTable {
  const int* pages;
  const int* indptr;  // [B+1], null for the two-dimensional form
  int64_t row_stride;  // in entries; 0 in the indptr form
};

// One part of the cache's rows (latent, rope or scales): [num_pages, P, width], width contiguous; strides in bytes.
struct PagedRows {
  const uint8_t* data;
  int64_t page_stride;
  int64_t token_stride;
};

constexpr int kPageSize = MLA_PAGE_SIZE;

MLA_DEVICE const int* page_row(const PageTable& table, int b) {
  return table.pages + (table.indptr != nullptr ? int64_t(table.indptr[b]) : b * table.row_stride);
}
MLA_DEVICE const uint8_t* token_row(const PagedRows& rows, int page, int slot) {
  return rows.data + page * rows.page_stride + slot * rows.token_stride;
}

// Where a token of the paged cache lies. All offsets are 64-bit bytes; page tables are read only where a sequence has tokens.
// The including file is compiled with MLA_PAGE_SIZE defined.
#pragma once
#include "types.cuh"

// Page ids of the batch: [B, cols] with a row stride, or the indptr/indices form.
struct PageTable {
  const int* pages;
  const int* indptr;  // [B+1], null for the two-dimensional form
  int64_t row_stride;  // in entries; 0 in the indptr form
};

// One part of the cache's rows (latent, rope or scales): [num_pages, P, width], width contiguous.
struct PagedRows {
  const uint8_t* data;
  int64_t page_stride;  // in bytes
  int64_t token_stride;  // in bytes
};

constexpr int kPageSize = MLA_PAGE_SIZE;

// Where a token lies; a negative page is no token.
struct Place {
  int page;
  int slot;
};

// What a lane of the warp holds.
MLA_DEVICE Place shuffle_place(const Place& place, int lane) {
  return {__shfl_sync(0xffffffff, place.page, lane), __shfl_sync(0xffffffff, place.slot, lane)};
}

// First entry of a sequence's pages.
MLA_DEVICE const int* page_row(const PageTable& table, int b) {
  return table.pages + (table.indptr != nullptr ? int64_t(table.indptr[b]) : b * table.row_stride);
}
// Token t of sequence b; t lies below the sequence's page-padded length.
MLA_DEVICE Place place_of_token(const PageTable& table, int b, int t) {
  return {page_row(table, b)[t / kPageSize], t % kPageSize};
}
MLA_DEVICE const uint8_t* token_row(const PagedRows& rows, const Place& place) {
  return rows.data + place.page * rows.page_stride + place.slot * rows.token_stride;
}
// Row of token t of the sequence whose pages start at `pages`; t lies below the sequence's page-padded length.
MLA_DEVICE const uint8_t* token_row(const PagedRows& rows, const int* pages, int t) {
  return token_row(rows, Place{pages[t / kPageSize], t % kPageSize});
}

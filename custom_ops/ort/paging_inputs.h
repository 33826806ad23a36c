// What both operators on pages take: where the packed tokens of each request are, and its pages.
#pragma once

#include <cstdint>
#include <vector>

#include "ort/tensor.h"
#include "tq/operators.h"

namespace tq::ort {

struct PackedRequests {
  Tensor cumulative, past, table;
  int64_t requests, columns;

  int64_t past_of(int64_t request) const { return past.as<int32_t>()[request]; }
  int64_t start_of(int64_t request) const { return cumulative.as<int32_t>()[request]; }
  int64_t end_of(int64_t request) const { return start_of(request + 1); }
  // Tokens that its pages hold after the call.
  int64_t total_of(int64_t request) const {
    return past_of(request) + end_of(request) - start_of(request);
  }
  int64_t page_of(int64_t request, int64_t column) const {
    return table.as<int32_t>()[request * columns + column];
  }
};

// Refuses lengths that are negative, do not rise or do not end at `tokens`, and tables with too few
// columns or with a page that there is not, where a token needs it. Caches have `pages` pages of
// `page_slots` slots.
PackedRequests read_packed(const Api& api, OrtKernelContext* context, const char* op,
                           const spec::Input& cumulative, const spec::Input& past,
                           const spec::Input& table, int64_t tokens, int64_t pages,
                           int64_t page_slots);

// Refuses a page that gets tokens and is in the tables of two requests, or twice in one.
void expect_own_pages(const char* op, const PackedRequests& packed, int64_t pages,
                      int64_t page_slots);

}  // namespace tq::ort

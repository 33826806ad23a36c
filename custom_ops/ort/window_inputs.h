// The exact window as a node says it and as its caches must have room for it (core/window.h).
#pragma once

#include <cstdint>

#include "core/page_window.h"
#include "core/window.h"
#include "ort/tensor.h"
#include "tq/codec_spec.h"

namespace tq::ort {

// Reads `recent`, `sinks`, `overlay_rows` and `planes`; a node without them has no window, and rows. Caches of raw,
// which are exact as they are, have no entries.
Window read_window(const Api& api, const OrtKernelInfo* info, const char* op, bool is_raw);

// Exact tokens in pages (core/page_window.h), as a node says them.
struct PagedWindow {
  Window entries;
  int64_t row_stride;  // 0: the last dimension of the caches
};
PagedWindow read_paged_window(const Api& api, const OrtKernelInfo* info, const char* op,
                              bool is_raw);

// Returns the bytes from a row to the next in pages [P, S, N, W], of which a row uses `used`. Refuses
// less than those or more than W, and pages without room for the first tokens when they are full.
int64_t expect_page(const char* op, const PagedWindow& window, const Tensor& cache, int64_t used,
                    int head_size);

// Refuses planes of rows that have none, or are padded.
void expect_planes(const char* op, const Window& window, const char* cache, spec::Codec codec,
                   int head_size, int64_t width);

// The overlay has room for all entries in rows of `width` bytes.
void expect_overlay(const char* op, const Window& window, const char* cache, int head_size,
                    int64_t width);

// Tokens of the longest sequence have tags and rows that can be counted.
void expect_tokens(const char* op, const Window& window, int64_t past, int64_t tokens);

}  // namespace tq::ort

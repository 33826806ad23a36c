// The exact window as a node says it and as its caches must have room for it (core/window.h).
#pragma once

#include <cstdint>

#include "core/window.h"
#include "ort/tensor.h"
#include "tq/codec_spec.h"

namespace tq::ort {

// Reads `recent`, `sinks` and `overlay_rows`; a node without them has no window. Caches of raw,
// which are exact as they are, have no entries.
Window read_window(const Api& api, const OrtKernelInfo* info, const char* op, bool is_raw);

// The overlay has room for all entries in rows of `width` bytes.
void expect_overlay(const char* op, const Window& window, const char* cache, int head_size,
                    int64_t width);

// Tokens of the longest sequence have tags and rows that can be counted.
void expect_tokens(const char* op, const Window& window, int64_t past, int64_t tokens);

}  // namespace tq::ort

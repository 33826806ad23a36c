// The exact part of a tile; the contract is in window_tile.h.
#include "core/window_tile.h"

#include <algorithm>

#include "core/half.h"

namespace tq {
namespace {

constexpr Range (WindowRows::* kRuns[])(const WindowRows::Rows& rows, int r) const = {
    &WindowRows::sinks_of, &WindowRows::newest_of};

}  // namespace

bool WindowTile::covers(const WindowRows::Rows& rows) const {
  // Vectors of the call are made finite, entries may hold anything.
  const int64_t past = call_.past(rows.b);
  alignas(64) float value[spec::kMaxHeadSize];
  for (const Taken taken : kRuns) {
    const Range all = all_of(rows, taken);
    for (int64_t token = all.low; token < std::min(all.high, past); ++token) {
      window_.load(rows, token, false, value);
      if (!is_finite(value, call_.head_size)) return false;
    }
  }
  return true;
}

std::size_t WindowTile::work_size() const {
  return window_.is_on() ? kPrefillBlock * (3 * window_.width() + 1) : 0;
}

void WindowTile::attend(const WindowRows::Rows& rows, float* work) const {
  std::fill_n(rows.sums, static_cast<std::size_t>(rows.count) * window_.width(), 0.0f);
  for (const Taken taken : kRuns) attend_run(rows, taken, work);
}

void WindowTile::attend_run(const WindowRows::Rows& rows, Taken taken, float* work) const {
  const int width = static_cast<int>(window_.width());
  float* const keys = work;
  float* const values = keys + kPrefillBlock * width;
  float* const vectors = values + kPrefillBlock * width;
  float* const ones = vectors + kPrefillBlock * width;
  std::fill_n(ones, kPrefillBlock, 1.0f);
  const PrefillBlock block{keys, values, ones, ones, width, width};
  const Range all = all_of(rows, taken);
  for (int64_t at = all.low; at < all.high; at += kPrefillBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kPrefillBlock, all.high - at));
    load(rows, true, at, count, vectors);
    for (int from = 0; from < count; from += kBlock) {
      kernels_.transpose_block(vectors + from * width, std::min(kBlock, count - from), width,
                               keys + from * width);
    }
    load(rows, false, at, count, values);
    int low[kMaxRows], high[kMaxRows];
    for (int r = 0; r < rows.count; ++r) {
      const Range range = (window_.*taken)(rows, r);
      low[r] = static_cast<int>(std::clamp<int64_t>(range.low - at, 0, count));
      high[r] = static_cast<int>(std::clamp<int64_t>(range.high - at, 0, count));
    }
    kernels_.attend_block(block, rows.query, rows.count, low, high, rows.max, rows.weight,
                          rows.sums);
  }
}

Range WindowTile::all_of(const WindowRows::Rows& rows, Taken taken) const {
  return {(window_.*taken)(rows, 0).low, (window_.*taken)(rows, rows.count - 1).high};
}

// Vectors of resident tokens, each in `width` floats.
void WindowTile::load(const WindowRows::Rows& rows, bool is_key, int64_t first, int count,
                      float* out) const {
  const int size = call_.head_size, width = static_cast<int>(window_.width());
  for (int t = 0; t < count; ++t, out += width) {
    window_.load(rows, first + t, is_key, out);
    std::fill(out + size, out + width, 0.0f);
  }
}

}  // namespace tq

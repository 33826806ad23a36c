// Every number is bounded before any arithmetic with it; the contract is in window_inputs.h.
#include "ort/window_inputs.h"

#include <limits>
#include <string>

namespace tq::ort {
namespace {

constexpr int64_t kMaxOverlayRows = int64_t{1} << 31;
constexpr int64_t kMaxRowStride = int64_t{1} << 31;
constexpr int64_t kMaxPageSlots = int64_t{1} << 16;  // with exact tokens

int64_t read_count(const Api& api, const OrtKernelInfo* info, const char* op, const char* name,
                   int64_t most) {
  const int64_t count = read_int_or(api, info, name, 0);
  if (count < 0 || count > most) {
    throw OpError(std::string(op) + ": " + name + " is " + std::to_string(count) +
                  ", expected 0 to " + std::to_string(most));
  }
  return count;
}

Window read_entries(const Api& api, const OrtKernelInfo* info, const char* op, int64_t overlay_rows,
                    bool is_raw) {
  const Window window{read_count(api, info, op, "recent", spec::kMaxEntries),
                      read_count(api, info, op, "sinks", spec::kMaxEntries), overlay_rows};
  if (window.entries() > spec::kMaxEntries) {
    throw OpError(std::string(op) + ": recent and sinks together are " +
                  std::to_string(window.entries()) + ", expected at most " +
                  std::to_string(spec::kMaxEntries));
  }
  if (is_raw && window.is_on()) {
    throw OpError(std::string(op) +
                  ": recent and sinks are not 0, but caches of raw have no entries");
  }
  return window;
}

}  // namespace

Window read_window(const Api& api, const OrtKernelInfo* info, const char* op, bool is_raw) {
  Window window = read_entries(api, info, op,
                               read_count(api, info, op, "overlay_rows", kMaxOverlayRows), is_raw);
  window.has_planes = read_count(api, info, op, "planes", 1) == 1;
  if (window.has_planes && window.is_on() && window.takes_spare_rows()) {
    throw OpError(std::string(op) + ": planes is 1, but entries in spare rows need rows");
  }
  return window;
}

PagedWindow read_paged_window(const Api& api, const OrtKernelInfo* info, const char* op,
                              bool is_raw) {
  const Window entries = read_entries(api, info, op, 0, is_raw);
  return {entries, read_count(api, info, op, "row_stride", kMaxRowStride)};
}

int64_t expect_page(const char* op, const PagedWindow& window, const Tensor& cache, int64_t used,
                    int head_size) {
  const std::string where = std::string(op) + ": ";
  const int64_t slots = cache.dims[1], width = cache.dims[3];
  const int64_t stride = window.row_stride == 0 ? width : window.row_stride;
  if (stride < used || stride > width) {
    throw OpError(where + "row_stride is " + std::to_string(stride) + ", expected " +
                  std::to_string(used) + " to " + std::to_string(width) +
                  ", from the bytes of a row to the last dimension of " + cache.name);
  }
  if (!window.entries.is_on()) return stride;
  if (slots > kMaxPageSlots) {
    throw OpError(where + cache.name + " has pages of " + std::to_string(slots) +
                  " slots, expected at most " + std::to_string(kMaxPageSlots) +
                  " with exact tokens");
  }
  const int64_t room = slots * (width - stride) / PageWindow::entry_bytes(head_size);
  if (window.entries.sinks > std::min(room, slots)) {
    throw OpError(where + "sinks is " + std::to_string(window.entries.sinks) +
                  ", but a full page of " + cache.name + " has room for " +
                  std::to_string(std::min(room, slots)) + " entries");
  }
  return stride;
}

void expect_planes(const char* op, const Window& window, const char* cache, spec::Codec codec,
                   int head_size, int64_t width) {
  if (!window.has_planes) return;
  const int used = spec::row_bytes(codec, head_size);
  if (spec::is_rotated(codec.kind) && width == used) return;
  throw OpError(std::string(op) + ": planes is 1, but " + cache + " has row width " +
                std::to_string(width) + " of codec " +
                spec::kKindNames[static_cast<int>(codec.kind)] +
                ", expected a codec that rotates and the " + std::to_string(used) +
                " bytes of its rows");
}

void expect_overlay(const char* op, const Window& window, const char* cache, int head_size,
                    int64_t width) {
  const int64_t needed =
      window.entries() * spec::rows_per_entry(head_size, static_cast<int>(width));
  if (window.overlay_rows < needed && !window.takes_spare_rows()) {
    throw OpError(std::string(op) + ": overlay_rows is " + std::to_string(window.overlay_rows) +
                  ", but " + std::to_string(window.entries()) + " entries of head size " +
                  std::to_string(head_size) + " need " + std::to_string(needed) + " rows of " +
                  cache);
  }
}

void expect_tokens(const char* op, const Window& window, int64_t past, int64_t tokens) {
  const int64_t most = window.is_on() ? std::numeric_limits<uint32_t>::max()
                                      : std::numeric_limits<int64_t>::max() - window.overlay_rows;
  if (past > most || tokens > most - past) {
    throw OpError(std::string(op) + ": past_length " + std::to_string(past) + " plus " +
                  std::to_string(tokens) + " new tokens is more than can be addressed");
  }
}

}  // namespace tq::ort

// Every number is bounded before any arithmetic with it; the contract is in window_inputs.h.
#include "ort/window_inputs.h"

#include <limits>
#include <string>

namespace tq::ort {
namespace {

constexpr int64_t kMaxOverlayRows = int64_t{1} << 31;

int64_t read_count(const Api& api, const OrtKernelInfo* info, const char* op, const char* name,
                   int64_t most) {
  const int64_t count = read_int_or(api, info, name, 0);
  if (count < 0 || count > most) {
    throw OpError(std::string(op) + ": " + name + " is " + std::to_string(count) +
                  ", expected 0 to " + std::to_string(most));
  }
  return count;
}

}  // namespace

Window read_window(const Api& api, const OrtKernelInfo* info, const char* op, bool is_raw) {
  const Window window{read_count(api, info, op, "recent", spec::kMaxEntries),
                      read_count(api, info, op, "sinks", spec::kMaxEntries),
                      read_count(api, info, op, "overlay_rows", kMaxOverlayRows)};
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

// Attention to the exact window for the query rows of a prefill tile, by kernels.attend_block.
//
// A query row attends exactly to two runs of tokens: the sinks and the newest ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention_call.h"
#include "core/kernels.h"
#include "core/window_rows.h"

namespace tq {

// Of a call whose scores are products and nothing more.
class WindowTile {
 public:
  static constexpr int kMaxRows = 192;

  // The call and `window` outlive this object.
  WindowTile(const Kernels& kernels, const AttentionCall& call, const WindowRows& window)
      : kernels_(kernels), call_(call), window_(window) {}

  // Whether all that is taken is finite: if not, WindowRows::attend keeps apart what it spoils.
  bool covers(const WindowRows::Rows& rows) const;

  // Goes on with an online softmax at rows.max and rows.weight, and fills rows.sums; `work` has
  // work_size() floats. Where a maximum rises, what was summed before it is the caller's to scale.
  void attend(const WindowRows::Rows& rows, float* work) const;
  std::size_t work_size() const;

 private:
  using Taken = Range (WindowRows::*)(const WindowRows::Rows& rows, int r) const;

  // Of all rows: the ends of what a row takes rise with it.
  Range all_of(const WindowRows::Rows& rows, Taken taken) const;
  void attend_run(const WindowRows::Rows& rows, Taken taken, float* work) const;
  void load(const WindowRows::Rows& rows, bool is_key, int64_t first, int count, float* out) const;

  const Kernels& kernels_;
  const AttentionCall& call_;
  const WindowRows& window_;
};

}  // namespace tq

// The frequencies of offsets that turn, whose tables are made once where both are constant.
#pragma once

#include <optional>

#include "core/rotary_offset.h"
#include "ort/tensor.h"

namespace tq::ort {

// Whether an offset turns; one number stands for one that does not. Refuses frequencies without an
// offset, and with one that has not at least two rows [rows, heads, size].
bool expect_frequencies(const char* op, const Tensor& frequencies, const Tensor& offset,
                        int64_t heads, int size);

class ReadyRotaryOffset {
 public:
  // The inputs are those of the operator.
  ReadyRotaryOffset(const Api& api, const OrtKernelInfo* info, const spec::Input& frequencies,
                    const spec::Input& offset);

  // `storage` keeps what is made for this call. The tensors have been checked.
  const RotaryOffset* get(const Tensor& frequencies, const Tensor& offset,
                          std::optional<RotaryOffset>& storage) const;

 private:
  std::optional<RotaryOffset> constant_;
  std::vector<int64_t> dims_;  // of the constant offset
};

}  // namespace tq::ort

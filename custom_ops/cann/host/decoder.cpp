// The decoder's own operators on a device; the contract is in decoder.h.
#include "cann/host/decoder.h"

#include <algorithm>

#include "cann/host/launch.h"

namespace tq::cann {
namespace {

// The end of the run of consecutive numbers that begins at `first`; a kernel or a copy takes a run
// at once.
int64_t end_of_run(const int64_t* numbers, int64_t first, int64_t count) {
  int64_t end = first + 1;
  while (end < count && numbers[end] == numbers[end - 1] + 1) ++end;
  return end;
}

// Whether all sequences have the same positions.
bool is_shared(const ort::Tensor& positions) {
  const int64_t* const rows = positions.as<int64_t>();
  const int64_t tokens = positions.dims[1];
  for (int64_t b = 1; b < positions.dims[0]; ++b) {
    if (!std::equal(rows, rows + tokens, rows + b * tokens)) return false;
  }
  return true;
}

// Cosines and sines of all tokens side by side, each half of them twice, and one operator.
void rotate_by_vendor(VendorCall vendor, const ort::RotaryEmbeddingTensors& call, AclType type,
                      int64_t element_bytes) {
  const int64_t parts = is_shared(call.positions) ? 1 : call.batch;
  const int64_t half = call.head_size / 2, rows = parts * call.tokens;
  const auto table = [&](const ort::Tensor& numbers) {
    uint8_t* const wide = vendor.memory(rows * call.head_size * element_bytes);
    const int64_t* const positions = call.positions.as<int64_t>();
    for (int64_t first = 0, end = 0; first < rows; first = end) {
      end = end_of_run(positions, first, rows);
      const std::vector<int64_t> dims = {end - first, 2, half};
      const auto* const from = vendor.view(numbers.as<float>() + positions[first] * half,
                                           AclType::kFloat, dims, {half, 0, 1});
      const auto* const to =
          vendor.tensor(wide + first * call.head_size * element_bytes, type, dims);
      if (type == AclType::kFloat)
        vendor.run("aclnnInplaceCopy", to, from);
      else
        vendor.cast(from, type, to);
    }
    return vendor.tensor(wide, type, {parts, 1, call.tokens, call.head_size});
  };
  const std::vector<int64_t> dims = {call.batch, call.heads, call.tokens, call.head_size};
  const auto *const cosines = table(call.cosines), *const sines = table(call.sines);
  vendor.run("aclnnRotaryPositionEmbedding", vendor.tensor(call.x.data, type, dims), cosines, sines,
             int64_t{0}, vendor.tensor(call.y.data, type, dims));
}

}  // namespace

template <>
void DecoderKernel<spec::RmsNormalization>::compute(OrtKernelContext* context) {
  const ort::RmsNormalizationTensors call = ort::read_rms_normalization(api_, context, float_type_);
  if (call.rows == 0) return;
  VendorCall vendor = vendor_call(context, stream_of(api_, context, spec::RmsNormalization::kName));
  const std::vector<int64_t> rows = {call.rows, call.width};
  void* const inverse = vendor.memory(call.rows * static_cast<int64_t>(sizeof(float)));
  vendor.run("aclnnRmsNorm", vendor.tensor(call.x.data, type(), rows),
             vendor.tensor(call.scale.data, type(), {call.width}), static_cast<double>(epsilon_),
             vendor.tensor(call.y.data, type(), rows),
             vendor.tensor(inverse, AclType::kFloat, {call.rows, 1}));
}

template <>
void DecoderKernel<spec::RotaryEmbedding>::compute(OrtKernelContext* context) {
  const char* const op = spec::RotaryEmbedding::kName;
  const ort::RotaryEmbeddingTensors call = ort::read_rotary_embedding(api_, context, float_type_);
  if (call.count == 0) return;
  expect_kernel_head_size(op, call.x);
  expect_elements(op, call.x);
  expect_elements(op, call.cosines);
  void* const stream = stream_of(api_, context, op);
  const int64_t element_bytes = static_cast<int64_t>(element_size(element_));
  if (!library_->has_kernels()) {
    return rotate_by_vendor(vendor_call(context, stream), call, type(), element_bytes);
  }
  const uint64_t x = aligned(op, call.x), y = aligned(op, call.y);
  TqRotaryEmbeddingTiling tiling{};
  tiling.cosines = aligned(op, call.cosines);
  tiling.sines = aligned(op, call.sines);
  const auto launch =
      of_element(library_->tq_rotary_embedding_float32, library_->tq_rotary_embedding_float16);

  // One launch for each run of positions, of all sequences together where these are the same.
  const int64_t parts = is_shared(call.positions) ? 1 : call.batch;
  const int64_t heads = call.heads * (call.batch / parts);
  const int64_t bytes = heads * call.tokens * call.head_size * element_bytes;
  tiling.heads = narrow(heads);
  tiling.new_tokens = narrow(call.tokens);
  tiling.head_size = narrow(call.head_size);
  for (int64_t part = 0; part < parts; ++part) {
    tiling.x = x + static_cast<uint64_t>(part * bytes);
    tiling.y = y + static_cast<uint64_t>(part * bytes);
    const int64_t* const positions = call.positions.as<int64_t>() + part * call.tokens;
    for (int64_t first = 0, end = 0; first < call.tokens; first = end) {
      end = end_of_run(positions, first, call.tokens);
      tiling.first = narrow(first);
      tiling.count = narrow(end - first);
      tiling.position = narrow(positions[first]);
      expect_enqueued(op, "its kernel",
                      launch(cores_for(heads * (end - first), library_->cores), stream, &tiling));
    }
  }
}

template <>
void DecoderKernel<spec::Swish>::compute(OrtKernelContext* context) {
  const ort::SwishTensors call = ort::read_swish(api_, context, float_type_);
  if (call.count == 0) return;
  VendorCall vendor = vendor_call(context, stream_of(api_, context, spec::Swish::kName));
  vendor.run("aclnnSilu", vendor.tensor(call.x.data, type(), {call.count}),
             vendor.tensor(call.y.data, type(), {call.count}));
}

template <>
void DecoderKernel<spec::Transpose>::compute(OrtKernelContext* context) {
  const char* const op = spec::Transpose::kName;
  const ort::TransposeTensors call = ort::read_transpose(api_, context, float_type_);
  if (call.bytes == 0) return;
  void* const stream = stream_of(api_, context, op);
  const int64_t vectors = call.batch * call.rows * call.columns;
  if (call.rows == 1 || call.columns == 1) {
    enqueue_copy(*library_, op, "the copy of X", call.y.data, call.x.data, vectors * call.bytes,
                 stream);
    return;
  }
  VendorCall vendor = vendor_call(context, stream);
  const int64_t width = call.bytes / static_cast<int64_t>(element_size(element_));
  const std::vector<int64_t> dims = {call.batch, call.columns, call.rows, width};
  const int64_t row = call.columns * width;
  vendor.run("aclnnInplaceCopy", vendor.tensor(call.y.data, type(), dims),
             vendor.view(call.x.data, type(), dims, {call.rows * row, width, row, 1}));
}

template <>
void DecoderKernel<spec::Gather>::compute(OrtKernelContext* context) {
  const char* const op = spec::Gather::kName;
  const ort::GatherTensors call = ort::read_gather(api_, context, float_type_);
  if (call.bytes == 0) return;
  void* const stream = stream_of(api_, context, op);
  uint8_t* const y = static_cast<uint8_t*>(call.y.data);
  const int64_t* const indices = call.indices.as<int64_t>();
  for (int64_t first = 0, end = 0; first < call.count; first = end) {
    const int64_t row = indices[first] < 0 ? indices[first] + call.rows : indices[first];
    end = end_of_run(indices, first, call.count);
    // -1 and 0 are consecutive numbers, but not consecutive rows.
    if (indices[first] < 0) end = std::min(end, first - indices[first]);
    enqueue_copy(*library_, op, "the copy of a row", y + first * call.bytes,
                 call.data.as<uint8_t>() + row * call.bytes, (end - first) * call.bytes, stream);
  }
}

}  // namespace tq::cann

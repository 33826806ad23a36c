// Shapes are compared before any data is read; the contract is in codec_inputs.h.
#include "ort/codec_inputs.h"

#include "core/attention.h"

namespace tq::ort {
namespace {

// More than any codec of this layout, and small enough for the kernels' arithmetic.
constexpr int64_t kMaxRowWidth = 65536;

// A text of a model in a message, which has to be UTF-8: bytes that are no printable ASCII as \xNN.
std::string quoted(const std::string& text) {
  constexpr char kDigits[] = "0123456789abcdef";
  constexpr size_t kMost = 64;
  std::string found = "'";
  for (const char letter : text.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte >= 0x20 && byte < 0x7f) {
      found += letter;
    } else {
      found += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return found + (text.size() > kMost ? "...'" : "'");
}

void transpose_matrix(const Tensor& matrix, std::vector<float>& out) {
  const int rows = static_cast<int>(matrix.dims[0]), columns = static_cast<int>(matrix.dims[1]);
  out.resize(static_cast<size_t>(rows) * static_cast<size_t>(columns));
  transpose(matrix.as<float>(), rows, columns, out.data());
}

}  // namespace

std::string rows_of(spec::Codec codec, int head_size) {
  return std::string(spec::kKindNames[static_cast<int>(codec.kind)]) + " " +
         std::to_string(codec.bits) + " rows of head size " + std::to_string(head_size);
}

spec::Codec read_codec(const Api& api, const OrtKernelInfo* info, const char* op,
                       const std::string& prefix, int float_type) {
  const std::string name = read_string(api, info, op, (prefix + "codec").c_str());
  int kind = 0;
  std::string names;
  while (kind < spec::kKinds && name != spec::kKindNames[kind]) {
    names += (names.empty() ? "" : ", ") + std::string(spec::kKindNames[kind]);
    ++kind;
  }
  if (kind == spec::kKinds) {
    throw OpError(std::string(op) + ": " + prefix + "codec is " + quoted(name) +
                  ", expected one of " + names);
  }
  const int64_t bits = read_int(api, info, op, (prefix + "bits").c_str());
  std::string choices;
  for (const spec::Codec& codec : spec::kCodecs) {
    if (codec.kind != static_cast<spec::Kind>(kind)) continue;
    // Wider than the elements of the model is no form of raw.
    if (codec.kind == spec::Kind::kRaw && codec.bits == 32 && float_type != kFloat) continue;
    if (codec.bits == bits) return codec;
    choices += (choices.empty() ? "" : " or ") + std::to_string(codec.bits);
  }
  const bool is_raw = name == spec::kKindNames[static_cast<int>(spec::Kind::kRaw)];
  throw OpError(std::string(op) + ": " + prefix + "bits is " + std::to_string(bits) +
                ", expected " + choices + " for " + name +
                (is_raw ? std::string(" of ") + type_name(float_type) : ""));
}

int expect_rows(const char* op, const Tensor& cache, spec::Codec codec, int head_size) {
  const int64_t width = cache.dims[3];
  const int used = spec::row_bytes(codec, head_size);
  if (width < used || width > kMaxRowWidth) {
    throw OpError(
        std::string(op) + ": " + cache.name + " has row width " + std::to_string(width) + ", but " +
        rows_of(codec, head_size) + " have " + std::to_string(used) +
        (width < used ? " bytes" : " bytes and may be padded to " + std::to_string(kMaxRowWidth)));
  }
  return static_cast<int>(width);
}

void expect_tables(const char* op, const Tensor& rotation, const Tensor& centroids,
                   spec::Codec codec, int head_size) {
  expect_type(op, rotation, kFloat);
  expect_type(op, centroids, kFloat);
  if (!spec::is_rotated(codec.kind)) return;
  const std::string why = rows_of(codec, head_size);
  expect_dims(op, rotation, {head_size, spec::coordinates(codec, head_size)}, why.c_str());
  expect_dims(op, centroids, {spec::levels(codec)}, why.c_str());
}

int64_t expect_offset(const char* op, const Tensor& offset, int64_t heads, int head_size) {
  expect_type(op, offset, kFloat);
  expect_rank(op, offset, 3);
  const int64_t count = offset.dims[0];
  expect_dims(op, offset, {count, heads, head_size}, "the heads and the head size of the cache");
  if (count < 1 || count > kMaxOffsets) {
    throw OpError(std::string(op) + ": " + offset.name + " has shape " + text(offset.dims) +
                  ", expected 1 to " + std::to_string(kMaxOffsets) + " rows");
  }
  return count;
}

ReadyRotation::ReadyRotation(const Api& api, const OrtKernelInfo* info, const spec::Input& input,
                             spec::Codec codec, bool wants_transposed)
    : wants_transposed_(wants_transposed), is_rotated_(spec::is_rotated(codec.kind)) {
  if (!is_rotated_) return;
  const Tensor tensor = read_constant(api, info, input);
  // What has another shape is refused by the first call.
  const std::vector<int64_t>& dims = tensor.dims;
  if (tensor.type != kFloat || dims.size() != 2) return;
  if (dims[0] < 1 || dims[0] > spec::kMaxHeadSize) return;
  const int size = static_cast<int>(dims[0]), width = spec::coordinates(codec, size);
  if (dims[1] != width) return;
  signs_.resize(static_cast<size_t>(size));
  if (!read_hadamard(tensor.as<float>(), size, width, signs_.data(), &step_)) signs_.clear();
  if (wants_transposed_) transpose_matrix(tensor, transposed_);
}

Rotation ReadyRotation::get(const Tensor& tensor, std::vector<float>& storage) const {
  if (!is_rotated_) return {};
  const size_t size = static_cast<size_t>(tensor.dims[0]);
  const size_t width = static_cast<size_t>(tensor.dims[1]);
  Rotation rotation{};
  rotation.width = static_cast<int>(width);
  rotation.matrix = tensor.as<float>();
  // A constant of another head size was refused before.
  if (signs_.size() == size) {
    rotation.signs = signs_.data();
    rotation.step = step_;
  }
  if (!wants_transposed_) return rotation;
  if (transposed_.size() != size * width) {
    transpose_matrix(tensor, storage);
    rotation.transposed = storage.data();
  } else {
    rotation.transposed = transposed_.data();
  }
  return rotation;
}

}  // namespace tq::ort

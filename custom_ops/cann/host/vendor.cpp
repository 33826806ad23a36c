// Attention and encoding by CANN's operators; the contract is in vendor.h.
#include "cann/host/vendor.h"

#include <cstdio>
#include <cstring>

#include "cann/host/attention_cut.h"
#include "cann/host/limits.h"
#include "core/planes.h"

namespace tq::cann {
namespace {

constexpr AclType kHalf = AclType::kFloat16, kFloat = AclType::kFloat;
constexpr int kHostToDevice = 1;
constexpr int64_t kCausal = 2048;  // rows and columns of the mask that CANN's sparse modes take
constexpr int64_t kAll = INT32_MAX;
constexpr int64_t kRightDownCausal = 3, kBand = 4, kPerTokenAndHead = 3;
constexpr const char* kAttention = spec::Attention::kName;

// What CANN refused first, of codes and of float16.
struct Refusals {
  std::mutex mutex;
  std::string of_codes, of_halves;

  std::string get(bool decodes) {
    const std::lock_guard<std::mutex> lock(mutex);
    return decodes ? of_halves : of_codes;
  }
  void note(bool decodes, const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::string& noted = decodes ? of_halves : of_codes;
    if (!noted.empty()) return;
    noted = why;
    std::fprintf(stderr, "tq_onnx: CANN's attention %s is not used: %s\n",
                 decodes ? "over float16" : "over codes", why.c_str());
  }
};

Refusals& refusals() {
  static Refusals& kept = *new Refusals;
  return kept;
}

// Whether CANN's attention and our codec agree about rows. No 310P: CANN has no such kernel there.
bool fits(spec::Codec codec, const Window& window, const KernelLibrary& library) {
  return codec.kind == spec::Kind::kUniformSigned && codec.bits == 4 && window.has_planes &&
         std::strcmp(library.soc, "Ascend310P") != 0;
}

const void* constant_matrix(const ort::Api& api, const OrtKernelInfo* info,
                            const spec::Input& input) {
  const ort::Tensor rotation = ort::read_constant(api, info, input);
  return rotation.dims.size() == 2 && rotation.dims[0] == rotation.dims[1] ? rotation.data : nullptr;
}

bool is_given(const ort::Api& api, const OrtKernelInfo* info, const spec::Input& input) {
  size_t count = 0, size = 0;
  ort::check(api.kernel_info_input_count(info, &count));
  if (input.slot >= count) return false;
  ort::check(api.kernel_info_input_name(info, input.slot, nullptr, &size));
  return size > 1;
}

// What prompts need on the device: the mask, and the number 1.
struct Constants {
  explicit Constants(const Aclnn& aclnn) : memory(aclnn, kCausal * kCausal + sizeof(float)) {
    std::vector<uint8_t> bytes(kCausal * kCausal + sizeof(float));
    for (int64_t i = 0; i < kCausal; ++i) {
      std::fill_n(bytes.begin() + i * kCausal + i + 1, kCausal - i - 1, uint8_t{1});
    }
    const float one = 1.0f;
    std::memcpy(bytes.data() + kCausal * kCausal, &one, sizeof one);
    const int status =
        aclnn.copy(memory.data(), bytes.size(), bytes.data(), bytes.size(), kHostToDevice);
    if (status != 0) throw std::runtime_error("ACL error " + std::to_string(status));
  }

  const void* mask() const { return memory.data(); }
  const void* one() const { return memory.data() + kCausal * kCausal; }

  DeviceMemory memory;
};

// Of this process, and never released: the runtime may be gone when it ends.
const Constants& constants(const Aclnn& aclnn) {
  static const Constants& made = *new Constants(aclnn);
  return made;
}

// One sequence of a cache in planes: codes [N, S, D / 2], then scales [N, S].
struct Plane {
  Plane(const ort::Tensor& cache, spec::Codec codec, int64_t overlay_rows, int64_t b, int64_t size)
      : planes(codec, static_cast<int>(size), cache.dims[1], cache.dims[2], overlay_rows),
        heads(planes.heads), slots(planes.slots),
        codes(static_cast<uint8_t*>(cache.data) + planes.codes(b, 0, 0)),
        scales(static_cast<uint8_t*>(cache.data) + planes.fields(b, 0, 0)) {}

  // Whether tensors of all slots that begin at another one, and so end behind the last head's, have no
  // bytes but of this sequence: those of the entries are behind the scales.
  bool can_begin_at(int64_t slot) const {
    const int64_t behind = heads * planes.overlay_rows * planes.width();
    return slot * planes.field_bytes <= behind &&
           slot * planes.code_bytes <= behind + heads * slots * planes.field_bytes;
  }

  Planes planes;
  int64_t heads, slots;
  uint8_t *codes, *scales;
};

// Slots first .. end - 1 of all heads as float16 [N, end - first, D].
const void* decoded(VendorCall& call, const Plane& plane, int64_t size, int64_t first, int64_t end,
                    const Constants& kept) {
  const int64_t count = end - first, rows = plane.heads * count, bytes = size / 2;
  const uint8_t* codes = plane.codes + first * bytes;
  // Bytes are copied: that INT4 may have strides is not documented of what makes it whole.
  if (count < plane.slots && plane.heads > 1) {
    const std::vector<int64_t> dims = {plane.heads, count * bytes};
    uint8_t* const part = call.memory(rows * bytes);
    call.run("aclnnInplaceCopy", call.tensor(part, AclType::kInt8, dims),
             call.view(codes, AclType::kInt8, dims, {plane.slots * bytes, 1}));
    codes = part;
  }
  uint8_t* const halves = call.memory(rows * size * 2);
  const auto* const out = call.tensor(halves, kHalf, {plane.heads, count, size});
  const aclTensor* const none = nullptr;
  call.run("aclnnAscendAntiQuant", call.tensor(codes, AclType::kInt4, {plane.heads, count, size}),
           call.tensor(kept.one(), kFloat, {1}), none, static_cast<int64_t>(kHalf), false, out);
  call.run("aclnnMul", out,
           call.view(plane.scales + first * static_cast<int64_t>(sizeof(float)), kFloat,
                     {plane.heads, count, 1}, {plane.slots, 1, 1}),
           out);
  return halves;
}

// What one sequence attends: its queries, all of which see keys, of slots first .. end - 1.
struct Sequence {
  int64_t b, first, end, tokens;
  const uint8_t* query;
  uint8_t *out, *logs;  // `logs` may be null
};

// Of how a node attends.
struct Rule {
  spec::Codec codec;
  float scale;
  int64_t overlay_rows, sliding_window;
  bool decodes;
};

void attend_sequence(VendorCall& call, const Aclnn& aclnn, const KernelLibrary& library, void* stream,
                     const ort::AttentionTensors& tensors, const Sequence& sequence,
                     const Rule& rule) {
  const int64_t size = tensors.head_size, tokens = sequence.tokens;
  const Plane key(tensors.key_cache, rule.codec, rule.overlay_rows, sequence.b, size);
  const Plane value(tensors.value_cache, rule.codec, rule.overlay_rows, sequence.b, size);
  const std::vector<int64_t> queries = {1, tensors.query_heads, tokens, size};
  std::vector<int64_t> rows = {1, key.heads, key.slots, size};
  int64_t keys = sequence.end, sparse_mode = 0, before = kAll, behind = kAll;
  const aclTensor* const none = nullptr;
  const aclIntArray* const no_ints = nullptr;
  const aclTensorList *key_list, *value_list;
  const aclTensor *mask = none, *key_scale = none, *value_scale = none;
  if (rule.decodes) {
    const Constants& kept = constants(aclnn);
    rows[2] = keys = sequence.end - sequence.first;
    key_list = call.list(decoded(call, key, size, sequence.first, sequence.end, kept), kHalf, rows);
    value_list =
        call.list(decoded(call, value, size, sequence.first, sequence.end, kept), kHalf, rows);
    if (tokens > 1) {
      sparse_mode = rule.sliding_window > 0 ? kBand : kRightDownCausal;
      mask = call.tensor(kept.mask(), AclType::kInt8, {kCausal, kCausal});
      if (sparse_mode == kBand) before = rule.sliding_window - 1, behind = 0;
    }
  } else {
    const int64_t moved = key.can_begin_at(sequence.first) ? sequence.first : 0;
    const int64_t codes = moved * key.planes.code_bytes, scales = moved * key.planes.field_bytes;
    keys -= moved;
    key_list = call.list(key.codes + codes, AclType::kInt4, rows);
    value_list = call.list(value.codes + codes, AclType::kInt4, rows);
    key_scale = call.tensor(key.scales + scales, kFloat, {1, key.heads, key.slots});
    value_scale = call.tensor(value.scales + scales, kFloat, {1, value.heads, value.slots});
    if (moved == 0 && sequence.first > 0) {
      const size_t room = static_cast<size_t>(key.slots);
      uint8_t* const hidden = call.memory(key.slots);
      expect_enqueued(kAttention, "its mask", library.fill(hidden, room, 0, room, stream));
      expect_enqueued(kAttention, "its mask",
                      library.fill(hidden, room, 1, static_cast<size_t>(sequence.first), stream));
      mask = call.tensor(hidden, AclType::kInt8, {1, key.slots});
    }
  }
  const int64_t mode = rule.decodes ? 0 : kPerTokenAndHead;
  const aclTensor* const logs =
      sequence.logs == nullptr ? none
                               : call.tensor(sequence.logs, kFloat, {1, tensors.query_heads, tokens, 1});
  char layout[] = "BNSD";
  call.run("aclnnFusedInferAttentionScoreV2", call.tensor(sequence.query, kHalf, queries), key_list,
           value_list, none, mask, no_ints, call.ints({keys}), none, none, none, none, none, none,
           none, none, none, none, key_scale, none, value_scale, none, none, none, no_ints,
           tensors.query_heads, static_cast<double>(rule.scale), before, behind, &layout[0],
           key.heads, sparse_mode, int64_t{0}, int64_t{0}, int64_t{0}, logs != none, mode, mode,
           call.tensor(sequence.out, kHalf, queries), logs);
}

// The same where the first queries see nothing: zeros for them, and the others by themselves.
void attend_visible(VendorCall& call, const Aclnn& aclnn, const KernelLibrary& library, void* stream,
                    const ort::AttentionTensors& tensors, Sequence sequence, const Rule& rule) {
  const int64_t blind = sequence.tokens - std::min(sequence.tokens, sequence.end - sequence.first);
  if (blind <= 0) return attend_sequence(call, aclnn, library, stream, tensors, sequence, rule);
  const int64_t size = tensors.head_size, heads = tensors.query_heads, row = size * 2;
  const int64_t bytes = heads * sequence.tokens * row, seeing = sequence.tokens - blind;
  expect_enqueued(kAttention, "the zeros of its padding",
                  library.fill(sequence.out, static_cast<size_t>(bytes), 0,
                               static_cast<size_t>(bytes), stream));
  if (seeing == 0) return;
  const std::vector<int64_t> dims = {heads, seeing, size};
  const std::vector<int64_t> strides = {sequence.tokens * size, size, 1};
  uint8_t *const query = call.memory(heads * seeing * row), *const out = call.memory(heads * seeing * row);
  call.run("aclnnInplaceCopy", call.tensor(query, kHalf, dims),
           call.view(sequence.query + blind * row, kHalf, dims, strides));
  uint8_t* const whole = sequence.out;
  sequence.query = query, sequence.out = out, sequence.tokens = seeing;
  attend_sequence(call, aclnn, library, stream, tensors, sequence, rule);
  call.run("aclnnInplaceCopy", call.view(whole + blind * row, kHalf, dims, strides),
           call.tensor(out, kHalf, dims));
}

// The elements of a model as float16, in scratch memory where they are others.
const void* as_half(VendorCall& call, const ort::Tensor& tensor, int64_t count, Element element) {
  if (element != Element::kFloat) return tensor.data;
  uint8_t* const halves = call.memory(count * 2);
  call.cast(call.tensor(tensor.data, kFloat, {count}), kHalf, call.tensor(halves, kHalf, {count}));
  return halves;
}

}  // namespace

const void* HalfRotation::get(VendorCall& call, const ort::Tensor& rotation,
                              const KernelLibrary& library, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (memory_ == nullptr) {
    const int64_t size = rotation.dims[0], half = size / 2;
    auto made = std::make_unique<DeviceMemory>(aclnn_, static_cast<size_t>(size * size * 2));
    call.cast(call.view(constant_, kFloat, {size, half, 2}, {size, 1, half}), kHalf,
              call.tensor(made->data(), kHalf, {size, half, 2}));
    // Calls on other streams use it, too.
    library.wait(stream);
    memory_ = std::move(made);
  }
  return memory_->data();
}

// ---- attention

std::unique_ptr<VendorAttention> VendorAttention::of(const ort::Api& api,
                                                     const OrtKernelInfo* info,
                                                     const ort::AttentionAttributes& attributes,
                                                     const KernelLibrary& library) {
  using Op = spec::Attention;
  const Aclnn* const aclnn = Aclnn::find();
  if (aclnn == nullptr) return nullptr;
  if (!fits(attributes.key, attributes.window, library) ||
      !fits(attributes.value, attributes.window, library)) {
    return nullptr;
  }
  if (attributes.softcap != 0.0f) return nullptr;
  for (const spec::Input& input : {Op::kKeyOffset, Op::kValueOffset}) {
    if (is_given(api, info, input)) return nullptr;
  }
  const bool joins = attributes.window.is_on() || is_given(api, info, Op::kHeadSink);
  if (joins && !library.has_kernels()) return nullptr;
  const void* const key = constant_matrix(api, info, Op::kKeyRotation);
  const void* const value = constant_matrix(api, info, Op::kValueRotation);
  if (key == nullptr || value == nullptr) return nullptr;
  return std::unique_ptr<VendorAttention>(
      new VendorAttention(*aclnn, library, key, value, attributes, joins));
}

Slots slots_of_codes(const ort::AttentionAttributes& attributes, int64_t past, int64_t padding,
                     int64_t tokens) {
  const int64_t end = past + tokens;
  int64_t first = std::max(padding, attributes.window.sinks);
  if (attributes.sliding_window > 0 && tokens == 1) {
    first = std::max(first, end - attributes.sliding_window);
  }
  first = std::min(first, end);
  return {first, std::max(first, end - attributes.window.recent)};
}

bool VendorAttention::attend(VendorCall& vendor, const ort::AttentionTensors& call, Element element,
                             void* stream, Middle& middle) {
  // Codes are for one query token.
  for (const bool decodes : {false, true}) {
    if ((!decodes && call.tokens > 1) || !refusals().get(decodes).empty()) continue;
    if (decodes && (joins_ || (call.tokens == 1 && library_.has_kernels()))) continue;
    try {
      if (joins_) {
        middle = averages(vendor, call, element, stream, decodes);
      } else {
        attend_whole(vendor, call, element, stream, decodes);
      }
      return !joins_;
    } catch (const VendorRefusal& refusal) {
      refusals().note(decodes, refusal.what());
    }
  }
  if (library_.has_kernels()) return false;
  throw ort::OpError(std::string(spec::Attention::kName) + " on " + kProvider +
                     ": CANN refuses the attention (" + refusals().get(true) +
                     "), expected its aclnnFusedInferAttentionScoreV2 to take float16");
}

Middle VendorAttention::averages(VendorCall& vendor, const ort::AttentionTensors& call,
                                 Element element, void* stream, bool decodes) {
  const int64_t size = call.head_size, rows = call.batch * call.query_heads * call.tokens;
  const int64_t count = rows * size, each = rows / call.batch;
  std::vector<Sequence> sequences;
  for (int64_t b = 0; b < call.batch; ++b) {
    const Slots slots = slots_of_codes(attributes_, of_sequence(call.past_length, b),
                                       of_sequence(call.left_padding, b), call.tokens);
    if (joins_ && slots.first == slots.end) continue;
    sequences.push_back({b, slots.first, slots.end, call.tokens, nullptr, nullptr, nullptr});
  }
  if (sequences.empty()) return {};
  const void* const rotation = key_rotation_.get(vendor, call.key_rotation, library_, stream);
  const void* const query = as_half(vendor, call.query, count, element);
  uint8_t* const rotated = vendor.memory(count * 2);
  uint8_t* const attended = vendor.memory(count * 2);
  uint8_t* const logs = joins_ ? vendor.memory((rows + kTaskQueries) * 4) : nullptr;
  vendor.multiply(query, rows, size, rotation, false, rotated);
  for (Sequence& sequence : sequences) {
    const int64_t row = sequence.b * each;
    sequence.query = rotated + row * size * 2, sequence.out = attended + row * size * 2;
    if (joins_) sequence.logs = logs + row * 4;
    attend_visible(vendor, aclnn_, library_, stream, call, sequence,
                   {attributes_.key, attributes_.scale, attributes_.window.overlay_rows,
                    attributes_.sliding_window, decodes});
  }
  return {attended, logs};
}

void VendorAttention::attend_whole(VendorCall& vendor, const ort::AttentionTensors& call,
                                   Element element, void* stream, bool decodes) {
  const int64_t size = call.head_size, rows = call.batch * call.query_heads * call.tokens;
  const void* const rotation = value_rotation_.get(vendor, call.value_rotation, library_, stream);
  const uint8_t* const attended = averages(vendor, call, element, stream, decodes).averages;
  if (element != Element::kFloat) {
    return vendor.multiply(attended, rows, size, rotation, true, call.output.data);
  }
  uint8_t* const halves = vendor.memory(rows * size * 2);
  vendor.multiply(attended, rows, size, rotation, true, halves);
  vendor.cast(vendor.tensor(halves, kHalf, {rows * size}), kFloat,
              vendor.tensor(call.output.data, kFloat, {rows * size}));
}

// ---- encoding

std::unique_ptr<VendorEncode> VendorEncode::of(const ort::Api& api, const OrtKernelInfo* info,
                                               spec::Codec codec, const Window& window,
                                               const KernelLibrary& library) {
  using Op = spec::Encode;
  const Aclnn* const aclnn = Aclnn::find();
  const void* const rotation = constant_matrix(api, info, Op::kRotation);
  if (aclnn == nullptr || rotation == nullptr || !fits(codec, window, library)) return nullptr;
  if (window.is_on() || is_given(api, info, Op::kOffset)) return nullptr;
  return std::unique_ptr<VendorEncode>(new VendorEncode(*aclnn, library, rotation, codec, window));
}

void VendorEncode::encode(const ort::Api& api, const OrtKernelContext* context,
                          const ort::EncodeTensors& call, Element element, void* stream) {
  using Op = spec::Encode;
  VendorCall vendor(aclnn_, api, context, Op::kName, Op::kVectors, stream);
  const int64_t size = call.head_size, tokens = call.tokens, heads = call.heads;
  const int64_t rows = call.batch * heads * tokens, bytes = size / 2;
  const void* const rotation = rotation_.get(vendor, call.rotation, library_, stream);
  const void* const vectors = as_half(vendor, call.vectors, rows * size, element);
  uint8_t* const rotated = vendor.memory(rows * size * 2);
  uint8_t* const codes = vendor.memory(rows * bytes);
  uint8_t* const scales = vendor.memory(rows * static_cast<int64_t>(sizeof(float)));
  const aclTensor* const none = nullptr;
  vendor.multiply(vectors, rows, size, rotation, false, rotated);
  vendor.run("aclnnDynamicQuant", vendor.tensor(rotated, kHalf, {rows, size}), none,
             vendor.tensor(codes, AclType::kInt4, {rows, size}),
             vendor.tensor(scales, kFloat, {rows}));
  for_each_part(call.past_length, {}, call.batch, [&](const Part& part) {
    const Plane plane(call.present, codec_, overlay_rows_, part.first, size);
    const int64_t first = part.first * heads * tokens, past = part.past_length;
    const int64_t sequence_bytes = plane.planes.sequence(1);
    const std::vector<int64_t> moved = {part.count, heads, tokens * bytes};
    vendor.run("aclnnInplaceCopy",
               vendor.view(plane.codes + past * bytes, AclType::kInt8, moved,
                           {sequence_bytes, plane.slots * bytes, 1}),
               vendor.tensor(codes + first * bytes, AclType::kInt8, moved));
    const std::vector<int64_t> numbers = {part.count, heads, tokens};
    vendor.run("aclnnInplaceCopy",
               vendor.view(plane.scales + past * 4, kFloat, numbers,
                           {sequence_bytes / 4, plane.slots, 1}),
               vendor.tensor(scales + first * 4, kFloat, numbers));
  });
}

}  // namespace tq::cann

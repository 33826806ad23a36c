// aclnnFusedInferAttentionScoreV2, layout BNSD: keys and values of the query's type, or for one query
// token INT4 with a scale for each token and head.
//
// INT4 is computed as the kernel does it: the rotated query, and the softmax weights times the values'
// scales, as four digits of -7..7, so that products are of integers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "aclnn.h"
#include "core/half.h"
#include "fake_acl.h"

namespace fake_acl {
namespace {

constexpr int kDigits = 4;
constexpr float kFirst = 7.49f,
                kNext = 14.98f;  // of the largest number of a row, and of a remainder
constexpr int64_t kBlock = 512;  // tokens whose weights share a largest one
constexpr int64_t kCausal = 2048;  // rows and columns of the mask of sparse modes 2 to 4
constexpr int64_t kPerTokenAndHead = 3;

using Given = std::shared_ptr<const View>;  // null where it is absent

struct Call {
  Given query, key, value, mask, key_scale, value_scale, out, lse;
  int64_t heads, kv_heads, sparse_mode, before, behind;
  double scale;
  Dims lengths{};  // of keys, by sequence
  Problem mistake{};  // that a test makes

  int64_t batch() const { return query->dims[0]; }
  int64_t tokens() const { return query->dims[2]; }
  int64_t size() const { return query->dims[3]; }
  int64_t capacity() const { return key->dims[2]; }
  bool is_coded() const { return key->type == ACL_INT4; }
};

// x as a sum of digits that is exact but for the last.
void in_digits(std::vector<float>& x) {
  float largest = 0;
  for (const float each : x) largest = std::max(largest, std::fabs(each));
  if (largest == 0) return;
  for (float& each : x) {
    float rest = each * (kFirst / largest), unit = 1, sum = 0;
    for (int i = 0; i < kDigits; ++i) {
      const float digit = std::nearbyint(rest);
      sum += digit * unit;
      rest = (rest - digit) * kNext;
      unit /= kNext;
    }
    each = sum * (largest / kFirst);
  }
}

float rounded(float x) { return tq::half_to_float(tq::float_to_half(x)); }

Problem check_shapes(const Call& call) {
  const View &q = *call.query, &k = *call.key, &v = *call.value;
  if (q.type != ACL_FLOAT16 && q.type != ACL_BF16) return "takes a float16 or bfloat16 query";
  if (q.dims.size() != 4 || k.dims.size() != 4) return "takes BNSD of rank 4: " + q.text();
  if (k.dims != v.dims || k.type != v.type) return "needs keys like values: " + k.text();
  if (call.out->type != q.type || call.out->dims != q.dims) {
    return "needs an output like the query: " + call.out->text();
  }
  for (const Given& each : {call.query, call.key, call.value, call.out}) {
    if (!each->is_contiguous()) return "takes contiguous tensors: " + each->text();
  }
  if (q.dims[0] != k.dims[0] || q.dims[3] != k.dims[3]) return "B or D differ: " + k.text();
  if (q.dims[0] > 65536 || call.kv_heads > 256 || call.heads > 256 || call.size() > 512) {
    return "takes at most 65536 sequences, 256 heads, a head size of 512";
  }
  if (call.heads != q.dims[1] || call.kv_heads != k.dims[1]) return "needs N as numHeads says";
  if (call.heads % call.kv_heads != 0 || call.heads / call.kv_heads > 64) {
    return "needs a group of whole heads, at most 64";
  }
  return {};
}

Problem check_scale(const Call& call, const Given& scale) {
  if (scale == nullptr) return "needs a scale of keys and of values";
  const View& view = *scale;
  if (view.type != ACL_FLOAT || view.dims != Dims{call.batch(), call.kv_heads, call.capacity()}) {
    return "needs float32 scales [B, N, S]: " + view.text();
  }
  return view.is_contiguous() ? Problem{} : Problem{"takes contiguous scales"};
}

Problem check_codes(const Call& call, int64_t key_mode, int64_t value_mode) {
  const bool has_scales = call.key_scale != nullptr || call.value_scale != nullptr;
  if (!call.is_coded()) {
    if (call.key->type != call.query->type) return "needs keys of the query's type";
    if (has_scales || key_mode != 0 || value_mode != 0) return "has scales of float keys";
    if (call.size() % 16 != 0) return "needs D as a multiple of 16";
    return {};
  }
  if (call.tokens() != 1) return "takes INT4 keys for one query token";
  if (call.size() % 64 != 0) return "needs D as a multiple of 64";
  // Modes without scales by token and head are not here.
  if (key_mode != kPerTokenAndHead || value_mode != kPerTokenAndHead) return "takes mode 3 twice";
  if (const Problem problem = check_scale(call, call.key_scale)) return problem;
  return check_scale(call, call.value_scale);
}

Problem check_mask(const Call& call) {
  if (call.mask != nullptr) {
    const aclDataType type = call.mask->type;
    if ((type != ACL_BOOL && type != ACL_INT8 && type != ACL_UINT8) ||
        !call.mask->is_contiguous()) {
      return "takes a contiguous mask of bool or int8";
    }
  }
  if (call.tokens() == 1) {
    // [B, S] and with dimensions of 1 between.
    if (call.mask == nullptr) return {};
    const Dims& dims = call.mask->dims;
    if (dims.size() < 2 || dims.size() > 4 || dims[0] != call.batch() ||
        dims.back() != call.capacity() ||
        call.mask->count() != static_cast<std::size_t>(call.batch() * call.capacity())) {
      return "needs a mask [B, S] of one token";
    }
    return {};
  }
  if (call.sparse_mode < 0 || call.sparse_mode > 4) return "takes sparse modes 0 to 4";
  const bool is_compressed = call.sparse_mode == 3 || call.sparse_mode == 4;
  if (!is_compressed && !(call.sparse_mode == 0 && call.mask == nullptr)) {
    return "is here with sparse modes 3 and 4, and 0 without a mask";
  }
  if (is_compressed && (call.mask == nullptr || call.mask->dims != Dims{kCausal, kCausal})) {
    return "needs a mask [2048, 2048] of sparse modes 3 and 4";
  }
  return {};
}

// Those that are given, one for all sequences or one for each.
Problem check_lengths(Call& call, const Dims& given) {
  const int64_t count = static_cast<int64_t>(given.size());
  if (count != 1 && count < call.batch()) return "takes 1 length or one for each sequence";
  for (int64_t b = 0; b < call.batch(); ++b) {
    const int64_t length = given[count == 1 ? 0 : b];
    if (length < 0 || length > call.capacity()) {
      return "length " + std::to_string(length) + " of " + std::to_string(call.capacity());
    }
    call.lengths.push_back(length);
  }
  return {};
}

// The first rows of one head: of codes or halves, or of scales, which are rows of one number.
std::vector<float> rows_of(const View& view, int64_t lane, int64_t count, int64_t size) {
  View part = view;
  part.dims = {count, size};
  part.strides = {size, 1};
  part.offset = view.offset + lane * view.dims[2] * size;
  return part.read();
}

// One query row over rows first .. seen - 1 of keys and values, without those that are hidden; returns
// the log of the sum of exponentials.
float attend(const Call& call, std::vector<float> query, const std::vector<float>& keys,
             const std::vector<float>& values, const std::vector<float>& key_scales,
             const std::vector<float>& value_scales, int64_t begin, int64_t seen,
             const float* hidden, float* out) {
  const int64_t size = call.size();
  std::fill_n(out, size, 0.0f);
  if (seen <= begin) return -std::numeric_limits<float>::infinity();
  if (call.is_coded()) in_digits(query);
  std::vector<float> scores(seen);
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t s = 0; s < seen; ++s) {
    float sum = 0;
    for (int64_t d = 0; d < size; ++d) sum += query[d] * keys[s * size + d];
    if (call.is_coded()) sum *= key_scales[s];
    scores[s] = sum * static_cast<float>(call.scale);
    if (s < begin || (hidden != nullptr && hidden[s] != 0)) {
      scores[s] = -std::numeric_limits<float>::infinity();
    }
    largest = std::max(largest, scores[s]);
  }
  float total = 0;
  for (float& score : scores) total += score = std::exp(score - largest);
  std::vector<double> sums(size, 0);
  for (int64_t first = 0; first < seen; first += kBlock) {
    const int64_t end = std::min(seen, first + kBlock);
    std::vector<float> weights(scores.begin() + first, scores.begin() + end);
    if (call.is_coded()) {
      for (int64_t s = first; s < end; ++s) weights[s - first] *= value_scales[s];
      in_digits(weights);
    } else {
      for (float& weight : weights) weight = rounded(weight);
    }
    for (int64_t s = first; s < end; ++s) {
      for (int64_t d = 0; d < size; ++d) sums[d] += weights[s - first] * values[s * size + d];
    }
  }
  for (int64_t d = 0; d < size; ++d) out[d] = static_cast<float>(sums[d] / total);
  return largest + std::log(total);
}

Problem run(const Call& call) {
  const int64_t size = call.size(), tokens = call.tokens(), group = call.heads / call.kv_heads;
  const bool is_causal = tokens > 1 && call.sparse_mode != 0;
  std::vector<float> mask;  // of one token
  if (is_causal) {
    const View& view = *call.mask;
    const auto* const bytes = static_cast<const uint8_t*>(view.host()) + view.offset;
    for (int64_t i = 0; i < kCausal * kCausal; ++i) {
      if (bytes[i] != (i % kCausal > i / kCausal))
        return "the mask of its sparse mode is not causal";
    }
  } else if (call.mask != nullptr) {
    mask = call.mask->read();
    for (const float each : mask) {
      if (each != 0 && each != 1) return "a mask has other numbers than 0 and 1";
    }
  }
  const std::vector<float> queries = call.query->read();
  std::vector<float> out(queries.size()), logs(call.batch() * call.heads * tokens);
  for (int64_t b = 0; b < call.batch(); ++b) {
    const int64_t length = call.lengths[b];
    for (int64_t n = 0; n < call.kv_heads; ++n) {
      const int64_t lane = b * call.kv_heads + n;
      const auto keys = rows_of(*call.key, lane, length, size);
      const auto values = rows_of(*call.value, lane, length, size);
      std::vector<float> key_scales, value_scales;
      if (call.is_coded()) {
        key_scales = rows_of(*call.key_scale, lane, length, 1);
        value_scales = rows_of(*call.value_scale, lane, length, 1);
      }
      for (int64_t row = 0; row < group * tokens; ++row) {
        const int64_t at = (lane * group + row / tokens) * tokens + row % tokens;
        const int64_t own = length - tokens + row % tokens;
        const bool is_band = is_causal && call.sparse_mode == 4;
        const int64_t seen = is_causal ? own + 1 + (is_band ? call.behind : 0) : length;
        const int64_t begin = is_band ? std::max<int64_t>(0, own - call.before) : 0;
        const float* const hidden =
            tokens > 1 || mask.empty() ? nullptr : &mask[b * call.capacity()];
        const auto first = queries.begin() + at * size;
        logs[at] = attend(call, {first, first + size}, keys, values, key_scales, value_scales,
                          begin, std::min(seen, length), hidden, &out[at * size]);
      }
    }
  }
  call.out->write(out);
  if (call.lse != nullptr) call.lse->write(logs);
  return {};
}

}  // namespace
}  // namespace fake_acl

using namespace fake_acl;

FAKE_ACLNN(aclnnFusedInferAttentionScoreV2, const aclTensor* query, const aclTensorList* key,
           const aclTensorList* value, const aclTensor* pseShift, const aclTensor* attenMask,
           const aclIntArray*, const aclIntArray* actualSeqLengthsKv, const aclTensor* deqScale1,
           const aclTensor* quantScale1, const aclTensor* deqScale2, const aclTensor* quantScale2,
           const aclTensor* quantOffset2, const aclTensor* antiquantScale,
           const aclTensor* antiquantOffset, const aclTensor* blockTable,
           const aclTensor* queryPaddingSize, const aclTensor* kvPaddingSize,
           const aclTensor* keyAntiquantScale, const aclTensor* keyAntiquantOffset,
           const aclTensor* valueAntiquantScale, const aclTensor* valueAntiquantOffset,
           const aclTensor* keySharedPrefix, const aclTensor* valueSharedPrefix,
           const aclIntArray* actualSharedPrefixLen, int64_t numHeads, double scaleValue,
           int64_t preTokens, int64_t nextTokens, char* inputLayout, int64_t numKeyValueHeads,
           int64_t sparseMode, int64_t innerPrecise, int64_t blockSize, int64_t antiquantMode,
           bool softmaxLseFlag, int64_t keyAntiquantMode, int64_t valueAntiquantMode,
           const aclTensor* attentionOut, const aclTensor* softmaxLse) {
  const std::string name = "aclnnFusedInferAttentionScoreV2";
  if (key == nullptr || value == nullptr) return refuse(kNullPointer, name + ": a null list");
  if (key->tensors.size() != 1 || value->tensors.size() != 1) {
    return refuse(kInvalid, name + " is here with one tensor of all sequences");
  }
  const aclTensor *const keys = key->tensors[0], *const values = value->tensors[0];
  if (keys->view->type == ACL_INT4 && is_refused(name + " of INT4")) return kInvalid;
  const auto call = std::make_shared<Call>();
  const auto check = [&]() -> Problem {
    const std::string soc = aclrtGetSocName();
    if (soc.rfind("Ascend910B", 0) != 0 && soc.rfind("Ascend910_93", 0) != 0) {
      return "is not for " + soc;
    }
    if (inputLayout == nullptr || std::strcmp(inputLayout, "BNSD") != 0) {
      return "is here with layout BNSD";
    }
    for (const aclTensor* absent :
         {pseShift, deqScale1, quantScale1, deqScale2, quantScale2, quantOffset2, antiquantScale,
          antiquantOffset, blockTable, queryPaddingSize, kvPaddingSize, keyAntiquantOffset,
          valueAntiquantOffset, keySharedPrefix, valueSharedPrefix}) {
      if (absent != nullptr) return "is here without shift, padding, pages, prefix and offsets";
    }
    if (actualSharedPrefixLen != nullptr || blockSize != 0 || antiquantMode < 0 ||
        antiquantMode > 1 || innerPrecise < 0 || innerPrecise > 3) {
      return "takes blockSize 0, antiquantMode 0 or 1, innerPrecise 0 to 3, no prefix";
    }
    const auto given = [](const aclTensor* tensor) {
      return tensor == nullptr ? nullptr : tensor->view;
    };
    *call = {given(query),
             given(keys),
             given(values),
             given(attenMask),
             given(keyAntiquantScale),
             given(valueAntiquantScale),
             given(attentionOut),
             softmaxLseFlag ? given(softmaxLse) : nullptr,
             numHeads,
             numKeyValueHeads,
             sparseMode,
             preTokens,
             nextTokens,
             scaleValue};
    int number = 0;
    for (int64_t* each : {&call->heads, &call->kv_heads, &call->sparse_mode, &call->before,
                          &call->behind, &keyAntiquantMode, &valueAntiquantMode}) {
      *each += mutation_of(number++);
    }
    call->scale *= 1 + 0.1 * static_cast<double>(mutation_of(number++));
    Problem problem = check_shapes(*call);
    if (!problem) problem = check_codes(*call, keyAntiquantMode, valueAntiquantMode);
    if (!problem) problem = check_mask(*call);
    if (problem) return problem;
    Dims lengths = {call->capacity()};  // where none are given
    if (actualSeqLengthsKv != nullptr) lengths = actualSeqLengthsKv->values;
    for (int64_t& each : lengths) each -= mutation_of(number);
    problem = check_lengths(*call, lengths);
    if (softmaxLseFlag &&
        (call->lse == nullptr || call->lse->type != ACL_FLOAT ||
         call->lse->dims != Dims{call->batch(), call->heads, call->tokens(), 1})) {
      return "needs softmaxLse float32 [B, N, S, 1]";
    }
    return problem;
  };
  // A mistake that a test makes fails on the stream: the host would take it for a refusal.
  const auto check_now = [&]() -> Problem {
    const Problem problem = check();
    if (fake_acl_was_mutated()) call->mistake = problem;
    return call->mistake ? Problem{} : problem;
  };
  const auto work = [call](const Planned&) { return call->mistake ? call->mistake : run(*call); };
  Tensors inputs = {query, keys, values}, outputs = {attentionOut};
  for (const aclTensor* optional : {attenMask, keyAntiquantScale, valueAntiquantScale}) {
    if (optional != nullptr) inputs.push_back(optional);
  }
  if (softmaxLseFlag && softmaxLse != nullptr) outputs.push_back(softmaxLse);
  const uint64_t bytes = query == nullptr ? 0 : 4096 + 4 * query->view->count() * kDigits;
  return FirstPhase{__func__, workspace, executor}.plan(inputs, outputs, bytes, check_now, work);
}

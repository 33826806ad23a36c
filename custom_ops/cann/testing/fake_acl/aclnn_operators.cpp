// The vendor's other operators that stand in where our kernels are not built.
#include <algorithm>
#include <cmath>

#include "aclnn.h"

using namespace fake_acl;

namespace {

using Types = std::initializer_list<aclDataType>;
const Types kFloats = {ACL_FLOAT, ACL_FLOAT16};

bool are_of(const Types& types, const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const aclTensor* tensor) {
    return std::find(types.begin(), types.end(), tensor->view->type) != types.end();
  });
}

// Whether all have the type of the first, which is one of these.
bool are_alike(const Types& types, const Tensors& tensors) {
  return are_of(types, {tensors[0]}) && are_of({tensors[0]->view->type}, tensors);
}

// Dimensions with another number of elements in a row.
Dims rows_of(const aclTensor* tensor, int64_t size) {
  Dims dims = tensor->view->dims;
  dims.back() = size;
  return dims;
}

Problem same_dims(const aclTensor* a, const aclTensor* b) {
  if (a->view->dims == b->view->dims) return {};
  return "needs one shape: " + a->view->text() + " and " + b->view->text();
}

void keep(Values&) {}

}  // namespace

FAKE_ACLNN(aclnnCast, const aclTensor* self, aclDataType dtype, aclTensor* out) {
  const auto check = [=]() -> Problem {
    if (are_of(kFloats, {self, out}) && out->view->type == dtype) return same_dims(self, out);
    return "is here between float32 and float16, and needs the output's type";
  };
  return FirstPhase{__func__, workspace, executor}.plan({self}, {out}, 0, check, keep);
}

FAKE_ACLNN(aclnnInplaceCopy, aclTensor* self, const aclTensor* source) {
  const auto check = [=]() -> Problem {
    if (are_alike({ACL_FLOAT, ACL_FLOAT16, ACL_INT8}, {self, source}))
      return same_dims(self, source);
    return "is here for tensors of one of some types";
  };
  return FirstPhase{__func__, workspace, executor}.plan({source}, {self}, 0, check, keep);
}

FAKE_ACLNN(aclnnMatmul, const aclTensor* self, const aclTensor* mat2, aclTensor* out,
           int8_t cubeMathType) {
  const auto check = [=]() -> Problem {
    const View &a = *self->view, &b = *mat2->view, &y = *out->view;
    if (!are_alike(kFloats, {self, mat2, out})) return "is here for tensors of one type";
    if (cubeMathType < 0 || cubeMathType > 3) return "takes cubeMathType 0 to 3";
    if (a.dims.size() == 2 && b.dims.size() == 2 && a.dims[1] == b.dims[0] &&
        y.dims == Dims{a.dims[0], b.dims[1]} && y.is_contiguous()) {
      return {};
    }
    return "is here for [M,K] and [K,N]: " + a.text() + ", " + b.text() + ", " + y.text();
  };
  const auto compute = [out = out == nullptr ? nullptr : out->view](Values& values) {
    const std::vector<float> a = values[0], b = values[1];
    const int64_t m = out->dims[0], n = out->dims[1], k = static_cast<int64_t>(b.size()) / n;
    values[0].resize(m * n);
    for (int64_t i = 0; i < m; ++i) {
      std::vector<double> sums(n, 0);
      for (int64_t j = 0; j < k; ++j) {
        for (int64_t c = 0; c < n; ++c) sums[c] += double{a[i * k + j]} * b[j * n + c];
      }
      std::copy(sums.begin(), sums.end(), values[0].begin() + i * n);
    }
  };
  return FirstPhase{__func__, workspace, executor}.plan({self, mat2}, {out}, 1024, check, compute);
}

FAKE_ACLNN(aclnnDynamicQuant, const aclTensor* x, const aclTensor* smoothScales,
           const aclTensor* yOut, const aclTensor* scaleOut) {
  const auto check = [=]() -> Problem {
    Dims rows = x->view->dims;
    if (rows.empty() || rows.back() % 2 != 0) return "needs an even last dimension";
    rows.pop_back();
    if (smoothScales != nullptr) return "is here without smoothScales";
    if (rows.empty() || scaleOut->view->dims != rows) return "needs scales of all rows";
    if (are_of({ACL_FLOAT16}, {x}) && are_of({ACL_INT4}, {yOut}) &&
        are_of({ACL_FLOAT}, {scaleOut})) {
      return same_dims(x, yOut);
    }
    return "is here from float16 to int4 with float32 scales";
  };
  const auto compute = [scales = scaleOut == nullptr ? nullptr : scaleOut->view](Values& values) {
    std::vector<float>& steps = values[1];
    steps.resize(scales->count());
    const std::size_t size = values[0].size() / steps.size();
    for (std::size_t r = 0; r < steps.size(); ++r) {
      float* const row = &values[0][r * size];
      float largest = 0;
      for (std::size_t d = 0; d < size; ++d) largest = std::max(largest, std::fabs(row[d]));
      steps[r] = largest / 7;
      for (std::size_t d = 0; d < size; ++d) {
        row[d] = largest == 0 ? 0 : std::nearbyint(row[d] / steps[r]);
      }
    }
  };
  return FirstPhase{__func__, workspace, executor}.plan({x}, {yOut, scaleOut}, 512, check, compute);
}

FAKE_ACLNN(aclnnAscendAntiQuant, const aclTensor* x, const aclTensor* scale,
           const aclTensor* offset, int64_t dstType, bool sqrtMode, const aclTensor* y) {
  const auto check = [=]() -> Problem {
    if (!are_of({ACL_INT4}, {x}) || !are_of({ACL_FLOAT16}, {y}) || dstType != ACL_FLOAT16) {
      return "is here from int4 to float16";
    }
    if (offset == nullptr && !sqrtMode && are_of({ACL_FLOAT}, {scale}) &&
        scale->view->dims == Dims{1}) {
      return same_dims(x, y);
    }
    return "is here with one float32 scale, without offset and sqrtMode";
  };
  const auto compute = [](Values& values) {
    for (float& each : values[0]) each *= values[1][0];
  };
  return FirstPhase{__func__, workspace, executor}.plan({x, scale}, {y}, 256, check, compute);
}

// other is [.., 1] of self [.., D].
FAKE_ACLNN(aclnnMul, const aclTensor* self, const aclTensor* other, aclTensor* out) {
  const auto check = [=]() -> Problem {
    if (!are_of(kFloats, {self, other, out})) return "does not take these types";
    if (other->view->dims != rows_of(self, 1)) return "is here with a number for each row";
    return same_dims(self, out);
  };
  const auto compute = [](Values& values) {
    const std::size_t size = values[0].size() / values[1].size();
    for (std::size_t i = 0; i < values[0].size(); ++i) values[0][i] *= values[1][i / size];
  };
  return FirstPhase{__func__, workspace, executor}.plan({self, other}, {out}, 0, check, compute);
}

FAKE_ACLNN(aclnnRmsNorm, const aclTensor* x, const aclTensor* gamma, double epsilon,
           const aclTensor* yOut, const aclTensor* rstdOut) {
  const auto check = [=]() -> Problem {
    if (!are_alike(kFloats, {x, yOut, gamma}) || !are_of({ACL_FLOAT}, {rstdOut})) {
      return "needs tensors of one type, and a float32 rstdOut";
    }
    if (gamma->view->dims == Dims{x->view->dims.back()} && rstdOut->view->dims == rows_of(x, 1)) {
      return same_dims(x, yOut);
    }
    return "needs gamma [E] and rstdOut of every row: " + rstdOut->view->text();
  };
  const auto compute = [epsilon](Values& values) {
    const std::vector<float> factors = values[1];
    const std::size_t size = factors.size();
    values[1].resize(values[0].size() / size);
    for (std::size_t r = 0; r < values[1].size(); ++r) {
      float* const row = &values[0][r * size];
      double sum = 0;
      for (std::size_t d = 0; d < size; ++d) sum += double{row[d]} * row[d];
      values[1][r] = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(size) + epsilon));
      for (std::size_t d = 0; d < size; ++d) row[d] *= values[1][r] * factors[d];
    }
  };
  return FirstPhase{__func__, workspace, executor}.plan({x, gamma}, {yOut, rstdOut}, 256, check,
                                                        compute);
}

FAKE_ACLNN(aclnnSilu, const aclTensor* self, aclTensor* out) {
  const auto check = [=]() -> Problem {
    return are_alike(kFloats, {self, out}) ? same_dims(self, out) : "needs one type";
  };
  const auto compute = [](Values& values) {
    for (float& each : values[0]) each = each / (1 + std::exp(-each));
  };
  return FirstPhase{__func__, workspace, executor}.plan({self}, {out}, 0, check, compute);
}

// x [B, N, S, D], cos and sin [1 or B, 1, S, D]; mode 0 rotates halves.
FAKE_ACLNN(aclnnRotaryPositionEmbedding, const aclTensor* x, const aclTensor* cos,
           const aclTensor* sin, int64_t mode, aclTensor* out) {
  const auto check = [=]() -> Problem {
    const Dims &dims = x->view->dims, &table = cos->view->dims;
    if (dims.size() != 4 || table != sin->view->dims || table.size() != 4 ||
        (table[0] != 1 && table[0] != dims[0]) || table[1] != 1 || table[2] != dims[2] ||
        table[3] != dims[3]) {
      return "needs [B,N,S,D] and cos and sin [1 or B,1,S,D]: " + cos->view->text();
    }
    if (!are_alike(kFloats, {x, cos, sin, out}) || mode != 0) {
      return "is here for tensors of one type and mode 0";
    }
    return dims[3] % 2 == 0 ? same_dims(x, out) : "needs an even D";
  };
  const auto compute = [out = out == nullptr ? nullptr : out->view](Values& values) {
    const std::vector<float> from = values[0];
    const int64_t size = out->dims[3], half = size / 2, heads = out->dims[1];
    const int64_t tokens = static_cast<int64_t>(values[1].size());  // of the table, with their rows
    const int64_t row = out->dims[2] * size;
    for (int64_t i = 0; i < static_cast<int64_t>(from.size()); ++i) {
      const int64_t at = (i / (row * heads) * row + i % row) % tokens;
      const float other = i % size < half ? -from[i + half] : from[i - half];
      values[0][i] = from[i] * values[1][at] + other * values[2][at];
    }
  };
  return FirstPhase{__func__, workspace, executor}.plan({x, cos, sin}, {out}, 0, check, compute);
}

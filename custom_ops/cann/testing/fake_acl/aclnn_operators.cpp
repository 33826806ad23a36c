// The vendor's other operators that stand in where our kernels are not built.
#include <algorithm>
#include <cmath>

#include "aclnn.h"
#include "element_types.h"

namespace fake_acl {
namespace {

const std::initializer_list<aclDataType> kFloats = {ACL_FLOAT, ACL_FLOAT16};

int64_t last(const aclTensor* tensor) { return tensor->view->dims.back(); }

// The simplest operators: of the elements of their inputs, one by one or row by row.
template <class Compute>
Work compute(const aclTensor* out, std::vector<const aclTensor*> inputs, Compute&& function) {
  std::vector<ViewRef> views;
  for (const aclTensor* input : inputs) views.push_back(input->view);
  return [views, to = out->view, function]() -> Problem {
    std::vector<std::vector<float>> values;
    for (const ViewRef& view : views) values.push_back(view->read());
    to->write(function(values));
    return {};
  };
}

Problem same_dims(const aclTensor* a, const aclTensor* b) {
  if (a->view->dims == b->view->dims) return {};
  return "needs one shape: " + a->view->text() + " and " + b->view->text();
}

}  // namespace
}  // namespace fake_acl

using namespace fake_acl;

extern "C" {

int aclnnCastGetWorkspaceSize(const aclTensor* self, aclDataType dtype, aclTensor* out,
                              uint64_t* workspace, aclOpExecutor** executor) {
  if (!self || !out) return refuse(kNullPointer, "aclnnCast: a null tensor");
  Problem problem = same_dims(self, out);
  if (!is_of(self, kFloats) || !is_of(out, kFloats) || out->view->type != dtype) {
    problem = "is here between float32 and float16, and needs the output's type";
  }
  return plan("aclnnCast", {self}, {out}, problem, 0,
              compute(out, {self}, [](auto& in) { return in[0]; }), workspace, executor);
}

int aclnnInplaceCopyGetWorkspaceSize(aclTensor* self, const aclTensor* source, uint64_t* workspace,
                                     aclOpExecutor** executor) {
  if (!self || !source) return refuse(kNullPointer, "aclnnInplaceCopy: a null tensor");
  Problem problem = same_dims(self, source);
  if (self->view->type != source->view->type) problem = "is here for tensors of one type";
  if (!is_of(self, {ACL_FLOAT, ACL_FLOAT16, ACL_INT8})) problem = "does not take this type";
  return plan("aclnnInplaceCopy", {source}, {self}, problem, 0,
              compute(self, {source}, [](auto& in) { return in[0]; }), workspace, executor);
}

int aclnnMatmulGetWorkspaceSize(const aclTensor* self, const aclTensor* mat2, aclTensor* out,
                                int8_t cubeMathType, uint64_t* workspace,
                                aclOpExecutor** executor) {
  if (!self || !mat2 || !out) return refuse(kNullPointer, "aclnnMatmul: a null tensor");
  const View &a = *self->view, &b = *mat2->view, &y = *out->view;
  Problem problem;
  if (a.type != b.type || a.type != y.type || !is_of(self, kFloats)) {
    problem = "is here for tensors of one type";
  } else if (cubeMathType < 0 || cubeMathType > 3) {
    problem = "takes cubeMathType 0 to 3";
  } else if (a.dims.size() != 2 || b.dims.size() != 2 || a.dims[1] != b.dims[0] ||
             y.dims != Dims{a.dims[0], b.dims[1]} || !y.is_contiguous()) {
    problem = "is here for [M,K] and [K,N]: " + a.text() + ", " + b.text() + ", " + y.text();
  }
  const auto work = compute(out, {self, mat2}, [m = a.dims[0], k = a.dims.back(),
                                                n = b.dims.back()](auto& in) {
    std::vector<float> product(m * n);
    for (int64_t i = 0; i < m; ++i) {
      std::vector<double> sums(n, 0);
      for (int64_t j = 0; j < k; ++j) {
        for (int64_t c = 0; c < n; ++c) sums[c] += double{in[0][i * k + j]} * in[1][j * n + c];
      }
      std::copy(sums.begin(), sums.end(), product.begin() + i * n);
    }
    return product;
  });
  return plan("aclnnMatmul", {self, mat2}, {out}, problem, 1024, work, workspace, executor);
}

int aclnnDynamicQuantGetWorkspaceSize(const aclTensor* x, const aclTensor* smoothScales,
                                      const aclTensor* yOut, const aclTensor* scaleOut,
                                      uint64_t* workspace, aclOpExecutor** executor) {
  if (!x || !yOut || !scaleOut) return refuse(kNullPointer, "aclnnDynamicQuant: a null tensor");
  Problem problem = same_dims(x, yOut);
  Dims rows = x->view->dims;
  const int64_t size = rows.back();
  rows.pop_back();
  if (smoothScales != nullptr) problem = "is here without smoothScales";
  if (!is_of(x, {ACL_FLOAT16}) || !is_of(yOut, {ACL_INT4}) || !is_of(scaleOut, {ACL_FLOAT})) {
    problem = "is here from float16 to int4 with float32 scales";
  }
  if (rows.empty() || scaleOut->view->dims != rows) problem = "needs scales of all rows";
  if (size % 2 != 0) problem = "needs an even last dimension";
  const auto work = [from = x->view, codes = yOut->view, scales = scaleOut->view,
                     size]() -> Problem {
    std::vector<float> values = from->read(), steps(values.size() / size);
    for (std::size_t r = 0; r < steps.size(); ++r) {
      float* const row = &values[r * size];
      float largest = 0;
      for (int64_t d = 0; d < size; ++d) largest = std::max(largest, std::fabs(row[d]));
      steps[r] = largest / 7;
      for (int64_t d = 0; d < size; ++d) {
        row[d] = largest == 0 ? 0 : std::nearbyint(row[d] / steps[r]);
      }
    }
    codes->write(values);
    scales->write(steps);
    return {};
  };
  return plan("aclnnDynamicQuant", {x}, {yOut, scaleOut}, problem, 512, work, workspace, executor);
}

int aclnnAscendAntiQuantGetWorkspaceSize(const aclTensor* x, const aclTensor* scale,
                                         const aclTensor* offset, int64_t dstType, bool sqrtMode,
                                         const aclTensor* y, uint64_t* workspace,
                                         aclOpExecutor** executor) {
  if (!x || !scale || !y) return refuse(kNullPointer, "aclnnAscendAntiQuant: a null tensor");
  Problem problem = same_dims(x, y);
  if (!is_of(x, {ACL_INT4}) || !is_of(y, {ACL_FLOAT16}) || dstType != ACL_FLOAT16) {
    problem = "is here from int4 to float16";
  }
  if (offset != nullptr || sqrtMode || !is_of(scale, {ACL_FLOAT}) ||
      scale->view->dims != Dims{1}) {
    problem = "is here with one float32 scale, without offset and sqrtMode";
  }
  return plan("aclnnAscendAntiQuant", {x, scale}, {y}, problem, 256,
              compute(y, {x, scale},
                      [](auto& in) {
                        for (float& each : in[0]) each *= in[1][0];
                        return in[0];
                      }),
              workspace, executor);
}

// other is [.., 1] of self [.., D].
int aclnnMulGetWorkspaceSize(const aclTensor* self, const aclTensor* other, aclTensor* out,
                             uint64_t* workspace, aclOpExecutor** executor) {
  if (!self || !other || !out) return refuse(kNullPointer, "aclnnMul: a null tensor");
  Problem problem = same_dims(self, out);
  Dims rows = self->view->dims;
  const int64_t size = rows.back();
  rows.back() = 1;
  if (other->view->dims != rows) problem = "is here with a number for each row";
  if (!is_of(self, kFloats) || !is_of(other, kFloats) || !is_of(out, kFloats)) {
    problem = "does not take these types";
  }
  return plan("aclnnMul", {self, other}, {out}, problem, 0,
              compute(out, {self, other},
                      [size](auto& in) {
                        for (std::size_t i = 0; i < in[0].size(); ++i) in[0][i] *= in[1][i / size];
                        return in[0];
                      }),
              workspace, executor);
}

int aclnnRmsNormGetWorkspaceSize(const aclTensor* x, const aclTensor* gamma, double epsilon,
                                 const aclTensor* yOut, const aclTensor* rstdOut,
                                 uint64_t* workspace, aclOpExecutor** executor) {
  if (!x || !gamma || !yOut || !rstdOut) return refuse(kNullPointer, "aclnnRmsNorm: a null tensor");
  Problem problem = same_dims(x, yOut);
  const int64_t size = last(x);
  Dims rows = x->view->dims;
  rows.back() = 1;
  if (x->view->type != yOut->view->type || x->view->type != gamma->view->type ||
      !is_of(x, kFloats) || !is_of(rstdOut, {ACL_FLOAT})) {
    problem = "needs tensors of one type, and a float32 rstdOut";
  }
  if (gamma->view->dims != Dims{size} || rstdOut->view->dims != rows) {
    problem = "needs gamma [E] and rstdOut of every row: " + rstdOut->view->text();
  }
  const auto work = [from = x->view, by = gamma->view, to = yOut->view, rstd = rstdOut->view, size,
                     epsilon]() -> Problem {
    std::vector<float> values = from->read(), factors = by->read(), inverse(values.size() / size);
    for (std::size_t r = 0; r < inverse.size(); ++r) {
      double sum = 0;
      for (int64_t d = 0; d < size; ++d) sum += double{values[r * size + d]} * values[r * size + d];
      inverse[r] = static_cast<float>(1 / std::sqrt(sum / size + epsilon));
      for (int64_t d = 0; d < size; ++d) values[r * size + d] *= inverse[r] * factors[d];
    }
    to->write(values);
    rstd->write(inverse);
    return {};
  };
  return plan("aclnnRmsNorm", {x, gamma}, {yOut, rstdOut}, problem, 256, work, workspace, executor);
}

int aclnnSiluGetWorkspaceSize(const aclTensor* self, aclTensor* out, uint64_t* workspace,
                              aclOpExecutor** executor) {
  if (!self || !out) return refuse(kNullPointer, "aclnnSilu: a null tensor");
  Problem problem = same_dims(self, out);
  if (self->view->type != out->view->type || !is_of(self, kFloats)) problem = "needs one type";
  return plan("aclnnSilu", {self}, {out}, problem, 0,
              compute(out, {self},
                      [](auto& in) {
                        for (float& each : in[0]) each = each / (1 + std::exp(-each));
                        return in[0];
                      }),
              workspace, executor);
}

// x [B, N, S, D], cos and sin [1 or B, 1, S, D]; mode 0 rotates halves.
int aclnnRotaryPositionEmbeddingGetWorkspaceSize(const aclTensor* x, const aclTensor* cos,
                                                 const aclTensor* sin, int64_t mode, aclTensor* out,
                                                 uint64_t* workspace, aclOpExecutor** executor) {
  if (!x || !cos || !sin || !out) return refuse(kNullPointer, "aclnnRotaryPositionEmbedding: null");
  Problem problem = same_dims(x, out);
  const Dims& dims = x->view->dims;
  if (dims.size() != 4 || cos->view->dims != sin->view->dims || cos->view->dims.size() != 4 ||
      (cos->view->dims[0] != 1 && cos->view->dims[0] != dims[0]) || cos->view->dims[1] != 1 ||
      cos->view->dims[2] != dims[2] || cos->view->dims[3] != dims[3]) {
    problem = "needs [B,N,S,D] and cos and sin [1 or B,1,S,D]: " + cos->view->text();
  } else if (x->view->type != cos->view->type || x->view->type != sin->view->type ||
             x->view->type != out->view->type || !is_of(x, kFloats) || mode != 0) {
    problem = "is here for tensors of one type and mode 0";
  } else if (dims[3] % 2 != 0) {
    problem = "needs an even D";
  }
  const bool is_shared = !problem && cos->view->dims[0] == 1;
  const auto work = compute(out, {x, cos, sin}, [dims, is_shared](auto& in) {
    const int64_t size = dims[3], half = size / 2, tokens = dims[2], heads = dims[1];
    std::vector<float> y(in[0].size());
    for (std::size_t i = 0; i < y.size(); ++i) {
      const int64_t d = i % size, s = i / size % tokens, b = i / (size * tokens * heads);
      const std::size_t at = ((is_shared ? 0 : b) * tokens + s) * size + d;
      const float other = d < half ? -in[0][i + half] : in[0][i - half];
      y[i] = in[0][i] * in[1][at] + other * in[2][at];
    }
    return y;
  });
  return plan("aclnnRotaryPositionEmbedding", {x, cos, sin}, {out}, problem, 0, work, workspace,
              executor);
}

}  // extern "C"

FAKE_ACLNN_SECOND_PHASE(aclnnCast)
FAKE_ACLNN_SECOND_PHASE(aclnnInplaceCopy)
FAKE_ACLNN_SECOND_PHASE(aclnnMatmul)
FAKE_ACLNN_SECOND_PHASE(aclnnDynamicQuant)
FAKE_ACLNN_SECOND_PHASE(aclnnAscendAntiQuant)
FAKE_ACLNN_SECOND_PHASE(aclnnMul)
FAKE_ACLNN_SECOND_PHASE(aclnnRmsNorm)
FAKE_ACLNN_SECOND_PHASE(aclnnSilu)
FAKE_ACLNN_SECOND_PHASE(aclnnRotaryPositionEmbedding)

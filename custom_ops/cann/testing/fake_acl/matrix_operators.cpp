// BatchMatMul: what the provider makes of MatMul.
#include <type_traits>

#include "operators.h"

namespace fake_acl {
namespace {

Dims batch_of(const Dims& dims) { return Dims(dims.begin(), dims.end() - 2); }

bool is_set(const aclopAttr& attributes, const char* name) {
  const auto found = attributes.numbers.find(name);
  return found != attributes.numbers.end() && found->second[0] != 0;
}

template <class Work>
bool with_matrix_type(aclDataType type, Work&& work) {
  if (type == ACL_INT32) return work(int32_t{}), true;
  return type != ACL_DOUBLE && with_float_type(type, work);
}

Problem check_matmul(const Inputs& inputs, const View& output, const aclopAttr& attributes) {
  if (inputs.size() != 2) return "takes 2 inputs";
  if (is_set(attributes, "adj_x1") || is_set(attributes, "adj_x2")) {
    return "is here only without adj_x1 and adj_x2";
  }
  const Dims &a = inputs[0].dims, &b = inputs[1].dims, &y = output.dims;
  if (a.size() < 2 || b.size() < 2 || y.size() < 2) return "takes matrices: rank 2 or more";
  if (inputs[0].type != output.type || inputs[1].type != output.type) {
    return "needs inputs and output of one type";
  }
  if (!with_matrix_type(output.type, [](auto) {})) return "takes float32, float16 and int32";
  const std::size_t m = a.size() - 2, n = y.size() - 2;
  if (a[m] != y[n] || a[m + 1] != b[b.size() - 2] || b.back() != y.back() ||
      !broadcasts(batch_of(a), batch_of(y)) || !broadcasts(batch_of(b), batch_of(y))) {
    return "needs [...,M,K] and [...,K,N] for [...,M,N]";
  }
  return {};
}

// Sums are in double (64-bit integers for int32) and rounded once: no order of additions of any
// device or library is closer to the truth than the others.
Problem run_matmul(const Inputs& inputs, const View& output) {
  const Dims batch = batch_of(output.dims);
  const std::size_t m = static_cast<std::size_t>(output.dims[batch.size()]);
  const std::size_t n = static_cast<std::size_t>(output.dims.back());
  const std::size_t k = static_cast<std::size_t>(inputs[0].dims.back());
  with_matrix_type(output.type, [&](auto type) {
    using T = decltype(type);
    using Sum = std::conditional_t<std::is_integral_v<T>, uint64_t, double>;
    std::vector<Sum> sums(n);
    for (std::size_t i = 0; i < element_count(batch); ++i) {
      const T* const a = static_cast<const T*>(inputs[0].host()) +
                         broadcast_index(i, batch, batch_of(inputs[0].dims)) * m * k;
      const T* const b = static_cast<const T*>(inputs[1].host()) +
                         broadcast_index(i, batch, batch_of(inputs[1].dims)) * k * n;
      T* const out = static_cast<T*>(output.host()) + i * m * n;
      for (std::size_t row = 0; row < m; ++row) {
        sums.assign(n, Sum{0});
        for (std::size_t inner = 0; inner < k; ++inner) {
          const Sum factor = static_cast<Sum>(load(a[row * k + inner]));
          const T* const line = b + inner * n;
          for (std::size_t j = 0; j < n; ++j) sums[j] += factor * static_cast<Sum>(load(line[j]));
        }
        for (std::size_t j = 0; j < n; ++j) {
          store(out[row * n + j], static_cast<typename Compute<T>::type>(sums[j]));
        }
      }
    }
  });
  return {};
}

}  // namespace

const Operators& matrix_operators() {
  static const Operators operators = {{"BatchMatMul", {check_matmul, run_matmul}},
                                      {"MatMul", {check_matmul, run_matmul}}};
  return operators;
}

}  // namespace fake_acl

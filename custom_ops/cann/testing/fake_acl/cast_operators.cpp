// Cast between every pair of types that the provider knows.
#include <cmath>
#include <limits>
#include <type_traits>

#include "element_types.h"
#include "operators.h"

namespace fake_acl {
namespace {

using Problem = std::optional<std::string>;
using Inputs = std::vector<Tensor>;

Problem check_cast(const Inputs& inputs, const Tensor& output, const aclopAttr& attributes) {
  if (inputs.size() != 1) return "takes 1 input";
  if (inputs[0].dims != output.dims) return "needs input and output of one shape";
  const auto type = attributes.ints.find("dst_type");
  if (type == attributes.ints.end() || type->second != static_cast<int64_t>(output.type)) {
    return "needs the output's type as its attribute 'dst_type'";
  }
  if (!with_type(inputs[0].type, [](auto) {}) || !with_type(output.type, [](auto) {})) {
    return "does not take these types";
  }
  return {};
}

// Whether the float has a place in the integer type once its fraction is cut off. Beyond that
// devices and processors differ, so nothing may depend on it.
template <class To, class From>
bool fits(From value) {
  // Both bounds are powers of two: exact as a double.
  const double low = static_cast<double>(std::numeric_limits<To>::min());
  const double beyond = std::ldexp(1.0, std::numeric_limits<To>::digits);
  const double cut = std::trunc(static_cast<double>(value));
  return cut >= low && cut < beyond;
}

template <class To, class From>
bool cast_one(From from, To& to) {
  const auto value = load(from);
  using Value = std::remove_const_t<decltype(value)>;
  if constexpr (std::is_same_v<To, Bool>) {
    store(to, static_cast<uint8_t>(value != Value{0}));
  } else {
    using Result = typename Compute<To>::type;
    if constexpr (std::is_floating_point_v<Value> && std::is_integral_v<Result>) {
      if (!fits<Result>(value)) return false;
    }
    store(to, static_cast<Result>(value));
  }
  return true;
}

Problem run_cast(const Inputs& inputs, const Tensor& output) {
  Problem problem;
  with_type(inputs[0].type, [&](auto from_type) {
    using From = decltype(from_type);
    with_type(output.type, [&](auto to_type) {
      using To = decltype(to_type);
      const From* const from = static_cast<const From*>(inputs[0].data);
      To* const to = static_cast<To*>(output.data);
      for (std::size_t i = 0; i < output.count(); ++i) {
        if (cast_one(from[i], to[i])) continue;
        problem = "casts " + std::to_string(static_cast<double>(load(from[i]))) + " at element " +
                  std::to_string(i) + " to " + name_of(output.type) + ", which cannot hold it";
        return;
      }
    });
  });
  return problem;
}

}  // namespace

const std::vector<NamedOperator>& cast_operators() {
  static const std::vector<NamedOperator> operators = {{"Cast", {check_cast, run_cast}}};
  return operators;
}

}  // namespace fake_acl

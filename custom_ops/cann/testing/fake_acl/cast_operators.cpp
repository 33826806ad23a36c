// Cast between every pair of types that the provider knows.
#include <cmath>
#include <limits>
#include <type_traits>

#include "operators.h"

namespace fake_acl {
namespace {

Problem check_cast(const Inputs& inputs, const View& output, const aclopAttr& attributes) {
  if (inputs.size() != 1) return "takes 1 input";
  if (inputs[0].dims != output.dims) return "needs input and output of one shape";
  const auto type = attributes.numbers.find("dst_type");
  if (type == attributes.numbers.end() || type->second[0] != output.type) {
    return "needs the output's type as its attribute 'dst_type'";
  }
  if (!with_type(inputs[0].type, [](auto) {}) || !with_type(output.type, [](auto) {})) {
    return "does not take these types";
  }
  return {};
}

// False for a float whose integer part has no place in the integer type: beyond that devices and
// processors differ, so nothing may depend on it. Both bounds are powers of two, exact as a double.
template <class To, class From>
bool cast_one(From from, To& to) {
  const auto value = load(from);
  using Value = std::remove_const_t<decltype(value)>;
  using Result = typename Compute<To>::type;
  if constexpr (std::is_same_v<To, Bool>) {
    store(to, static_cast<uint8_t>(value != Value{0}));
    return true;
  } else if constexpr (std::is_floating_point_v<Value> && std::is_integral_v<Result>) {
    const double whole = std::trunc(static_cast<double>(value));
    if (!(whole >= static_cast<double>(std::numeric_limits<Result>::min()) &&
          whole < std::ldexp(1.0, std::numeric_limits<Result>::digits))) {
      return false;
    }
  }
  store(to, static_cast<Result>(value));
  return true;
}

Problem run_cast(const Inputs& inputs, const View& output) {
  Problem problem;
  with_type(inputs[0].type, [&](auto from_type) {
    using From = decltype(from_type);
    with_type(output.type, [&](auto to_type) {
      using To = decltype(to_type);
      const From* const from = static_cast<const From*>(inputs[0].host());
      To* const to = static_cast<To*>(output.host());
      for (std::size_t i = 0; i < output.count(); ++i) {
        if (cast_one(from[i], to[i])) continue;
        problem = "casts " + std::to_string(static_cast<double>(load(from[i]))) + " at element " +
                  std::to_string(i) + " to " + output.text() + ", which cannot hold it";
        return;
      }
    });
  });
  return problem;
}

}  // namespace

const Operators& cast_operators() {
  static const Operators operators = {{"Cast", {check_cast, run_cast}}};
  return operators;
}

}  // namespace fake_acl

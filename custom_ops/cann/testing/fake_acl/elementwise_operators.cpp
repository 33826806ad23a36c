// Add, Sub, Mul, Div, BroadcastToD, and the functions of one tensor.
#include <cmath>
#include <type_traits>

#include "element_types.h"
#include "operators.h"

namespace fake_acl {
namespace {

using Problem = std::optional<std::string>;
using Inputs = std::vector<Tensor>;

// Whether this float attribute, where it is given, has the value under which the operator is the
// plain function.
bool is_plain(const aclopAttr& attributes, const char* name, float value) {
  const auto found = attributes.floats.find(name);
  return found == attributes.floats.end() || found->second == value;
}

// ---- two inputs of one type, broadcast as numpy does
Problem check_two(const Inputs& inputs, const Tensor& output, const aclopAttr&) {
  if (inputs.size() != 2) return "takes 2 inputs";
  for (const Tensor& input : inputs) {
    if (input.type != output.type) return "needs inputs and output of one type";
    if (!broadcasts(input.dims, output.dims)) return "needs inputs that broadcast to the output";
  }
  if (!with_number_type(output.type, [](auto) {})) return "does not take this type";
  return {};
}

// Integers wrap around, as on devices and in numpy, without C++'s undefined overflow.
template <class T, class Work>
T wrapped(T a, T b, Work work) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(work(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
  } else {
    return work(a, b);
  }
}

struct AddValues {
  template <class T>
  static T of(T a, T b) {
    return wrapped(a, b, [](auto x, auto y) { return x + y; });
  }
};
struct SubValues {
  template <class T>
  static T of(T a, T b) {
    return wrapped(a, b, [](auto x, auto y) { return x - y; });
  }
};
struct MulValues {
  template <class T>
  static T of(T a, T b) {
    return wrapped(a, b, [](auto x, auto y) { return x * y; });
  }
};
struct DivValues {
  // Towards zero, which is ONNX's rule for integers.
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
      return b == -1 ? SubValues::of(T{0}, a) : static_cast<T>(a / b);
    } else {
      return static_cast<T>(a / b);
    }
  }
};

template <class Function>
Problem run_two(const Inputs& inputs, const Tensor& output) {
  bool divides_by_zero = false;
  with_number_type(output.type, [&](auto type) {
    using T = decltype(type);
    const T* const a = static_cast<const T*>(inputs[0].data);
    const T* const b = static_cast<const T*>(inputs[1].data);
    T* const out = static_cast<T*>(output.data);
    const std::size_t count = output.count();
    for (std::size_t i = 0; i < count; ++i) {
      const auto x = load(a[broadcast_index(i, output.dims, inputs[0].dims)]);
      const auto y = load(b[broadcast_index(i, output.dims, inputs[1].dims)]);
      if (std::is_integral_v<T> && std::is_same_v<Function, DivValues> && y == 0) {
        divides_by_zero = true;
        return;
      }
      store(out[i], Function::of(x, y));
    }
  });
  if (divides_by_zero) return "divides an integer by zero";
  return {};
}

// ---- one input, copied over the output's shape
Problem check_broadcast(const Inputs& inputs, const Tensor& output, const aclopAttr& attributes) {
  if (inputs.size() != 1) return "takes 1 input";
  const auto shape = attributes.int_lists.find("shape");
  if (shape == attributes.int_lists.end() || shape->second != output.dims) {
    return "needs the output's shape as its attribute 'shape'";
  }
  if (inputs[0].type != output.type) return "needs input and output of one type";
  if (!broadcasts(inputs[0].dims, output.dims)) return "needs an input that broadcasts";
  if (!with_type(output.type, [](auto) {})) return "does not take this type";
  return {};
}

Problem run_broadcast(const Inputs& inputs, const Tensor& output) {
  with_type(output.type, [&](auto type) {
    using T = decltype(type);
    const T* const in = static_cast<const T*>(inputs[0].data);
    T* const out = static_cast<T*>(output.data);
    for (std::size_t i = 0; i < output.count(); ++i) {
      out[i] = in[broadcast_index(i, output.dims, inputs[0].dims)];
    }
  });
  return {};
}

// ---- one input, element by element
Problem check_one(const Inputs& inputs, const Tensor& output, const aclopAttr& attributes) {
  if (inputs.size() != 1) return "takes 1 input";
  if (inputs[0].type != output.type || inputs[0].dims != output.dims) {
    return "needs input and output of one type and shape";
  }
  // Exp and Log could have another base, scale and shift.
  if (!is_plain(attributes, "base", -1) || !is_plain(attributes, "scale", 1) ||
      !is_plain(attributes, "shift", 0)) {
    return "is here only with base -1, scale 1 and shift 0";
  }
  return {};
}

Problem check_one_float(const Inputs& inputs, const Tensor& output, const aclopAttr& attributes) {
  if (const Problem problem = check_one(inputs, output, attributes)) return problem;
  if (!with_float_type(output.type, [](auto) {})) return "takes floating-point numbers";
  return {};
}

Problem check_one_number(const Inputs& inputs, const Tensor& output, const aclopAttr& attributes) {
  if (const Problem problem = check_one(inputs, output, attributes)) return problem;
  if (!with_number_type(output.type, [](auto) {})) return "does not take this type";
  return {};
}

// float32 in float32, so that a result is what the CPU provider's is; float16 through float32.
template <class Function>
Problem run_one(const Inputs& inputs, const Tensor& output) {
  const auto work = [&](auto type) {
    using T = decltype(type);
    const T* const in = static_cast<const T*>(inputs[0].data);
    T* const out = static_cast<T*>(output.data);
    for (std::size_t i = 0; i < output.count(); ++i) store(out[i], Function::of(load(in[i])));
  };
  if constexpr (Function::kIntegers) {
    with_number_type(output.type, work);
  } else {
    with_float_type(output.type, work);
  }
  return {};
}

#define FAKE_ACL_FLOAT_FUNCTION(name, expression) \
  struct name {                                   \
    static constexpr bool kIntegers = false;      \
    template <class T>                            \
    static T of(T x) {                            \
      return expression;                          \
    }                                             \
  };
FAKE_ACL_FLOAT_FUNCTION(SqrtValue, std::sqrt(x))
FAKE_ACL_FLOAT_FUNCTION(ReciprocalValue, T(1) / x)
FAKE_ACL_FLOAT_FUNCTION(ExpValue, std::exp(x))
FAKE_ACL_FLOAT_FUNCTION(LogValue, std::log(x))
FAKE_ACL_FLOAT_FUNCTION(ErfValue, std::erf(x))
FAKE_ACL_FLOAT_FUNCTION(SinValue, std::sin(x))
FAKE_ACL_FLOAT_FUNCTION(CosValue, std::cos(x))
FAKE_ACL_FLOAT_FUNCTION(FloorValue, std::floor(x))
FAKE_ACL_FLOAT_FUNCTION(CeilValue, std::ceil(x))
FAKE_ACL_FLOAT_FUNCTION(RoundValue, std::nearbyint(x))  // ties to even
#undef FAKE_ACL_FLOAT_FUNCTION

struct NegValue {
  static constexpr bool kIntegers = true;
  template <class T>
  static T of(T x) {
    if constexpr (std::is_integral_v<T>) return SubValues::of(T{0}, x);
    return -x;
  }
};
struct AbsValue {
  static constexpr bool kIntegers = true;
  template <class T>
  static T of(T x) {
    if constexpr (!std::is_integral_v<T>) return std::fabs(x);
    return x < T{0} ? NegValue::of(x) : x;
  }
};
struct ReluValue {
  static constexpr bool kIntegers = true;
  template <class T>
  static T of(T x) {
    return x < T{0} ? T{0} : x;
  }
};

}  // namespace

const std::vector<NamedOperator>& elementwise_operators() {
  static const std::vector<NamedOperator> operators = {
      {"Add", {check_two, run_two<AddValues>}},
      {"Sub", {check_two, run_two<SubValues>}},
      {"Mul", {check_two, run_two<MulValues>}},
      {"Div", {check_two, run_two<DivValues>}},
      {"BroadcastToD", {check_broadcast, run_broadcast}},
      {"Neg", {check_one_number, run_one<NegValue>}},
      {"Abs", {check_one_number, run_one<AbsValue>}},
      {"Relu", {check_one_number, run_one<ReluValue>}},
      {"Sqrt", {check_one_float, run_one<SqrtValue>}},
      {"Reciprocal", {check_one_float, run_one<ReciprocalValue>}},
      {"Exp", {check_one_float, run_one<ExpValue>}},
      {"Log", {check_one_float, run_one<LogValue>}},
      {"Erf", {check_one_float, run_one<ErfValue>}},
      {"Sin", {check_one_float, run_one<SinValue>}},
      {"Cos", {check_one_float, run_one<CosValue>}},
      {"Floor", {check_one_float, run_one<FloorValue>}},
      {"Ceil", {check_one_float, run_one<CeilValue>}},
      {"Round", {check_one_float, run_one<RoundValue>}},
  };
  return operators;
}

}  // namespace fake_acl

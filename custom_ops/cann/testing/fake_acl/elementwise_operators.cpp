// Add, Sub, Mul, Div, BroadcastToD, and the functions of one tensor.
#include <cmath>
#include <type_traits>

#include "operators.h"

namespace fake_acl {
namespace {

template <class Value>
constexpr bool is_integer = std::is_integral_v<Value>;

// Calls `set(element, index)` for the elements of the output, until one is refused.
template <class T, class Set>
bool for_each_element(const View& output, Set&& set) {
  T* const out = static_cast<T*>(output.host());
  for (std::size_t i = 0; i < output.count(); ++i) {
    if (!set(out[i], i)) return false;
  }
  return true;
}

template <class T>
const T& element(const View& input, const View& output, std::size_t index) {
  return static_cast<const T*>(input.host())[broadcast_index(index, output.dims, input.dims)];
}

// ---- two inputs of one type, broadcast as numpy does
Problem check_two(const Inputs& inputs, const View& output, const aclopAttr&) {
  if (inputs.size() != 2) return "takes 2 inputs";
  for (const View& input : inputs) {
    if (input.type != output.type) return "needs inputs and output of one type";
    if (!broadcasts(input.dims, output.dims)) return "needs inputs that broadcast to the output";
  }
  if (!with_number_type(output.type, [](auto) {})) return "does not take this type";
  return {};
}

// Integers wrap around, as on devices and in numpy, without C++'s undefined overflow.
template <class Function>
auto wrapping(Function function) {
  return [function](auto x, auto y) {
    using T = decltype(x);
    if constexpr (!is_integer<T>) return function(x, y);
    return static_cast<T>(function(static_cast<uint64_t>(x), static_cast<uint64_t>(y)));
  };
}

// Towards zero, which is ONNX's rule for integers.
template <class T>
T divided(T x, T y) {
  if constexpr (is_integer<T> && std::is_signed_v<T>) {
    if (y == -1) return wrapping(std::minus<>())(T{0}, x);
  }
  return static_cast<T>(x / y);
}

template <class Function>
Operator two(Function function, bool divides = false) {
  return {check_two, [=](const Inputs& inputs, const View& output) -> Problem {
            bool is_defined = true;
            with_number_type(output.type, [&](auto type) {
              using T = decltype(type);
              is_defined = for_each_element<T>(output, [&](T& out, std::size_t i) {
                const auto x = load(element<T>(inputs[0], output, i));
                const auto y = load(element<T>(inputs[1], output, i));
                if (divides && is_integer<T> && y == 0) return false;
                store(out, function(x, y));
                return true;
              });
            });
            return is_defined ? Problem{} : "divides an integer by zero";
          }};
}

// ---- one input, copied over the output's shape
Problem check_broadcast(const Inputs& inputs, const View& output, const aclopAttr& attributes) {
  if (inputs.size() != 1) return "takes 1 input";
  const auto shape = attributes.numbers.find("shape");
  if (shape == attributes.numbers.end() ||
      Dims(shape->second.begin(), shape->second.end()) != output.dims) {
    return "needs the output's shape as its attribute 'shape'";
  }
  if (inputs[0].type != output.type) return "needs input and output of one type";
  if (!broadcasts(inputs[0].dims, output.dims)) return "needs an input that broadcasts";
  if (!with_type(output.type, [](auto) {})) return "does not take this type";
  return {};
}

Problem run_broadcast(const Inputs& inputs, const View& output) {
  with_type(output.type, [&](auto type) {
    using T = decltype(type);
    for_each_element<T>(output, [&](T& out, std::size_t i) {
      out = element<T>(inputs[0], output, i);
      return true;
    });
  });
  return {};
}

// ---- one input, element by element
Problem check_one(const Inputs& inputs, const View& output, const aclopAttr& attributes) {
  if (inputs.size() != 1) return "takes 1 input";
  if (inputs[0].type != output.type || inputs[0].dims != output.dims) {
    return "needs input and output of one type and shape";
  }
  // Exp and Log could have another base, scale and shift.
  for (const auto& [name, plain] : {std::pair("base", -1), {"scale", 1}, {"shift", 0}}) {
    const auto given = attributes.numbers.find(name);
    if (given == attributes.numbers.end() || given->second[0] == plain) continue;
    return "is here only with base -1, scale 1 and shift 0";
  }
  return {};
}

Problem check_floats(const Inputs& inputs, const View& output, const aclopAttr& attributes) {
  if (const Problem problem = check_one(inputs, output, attributes)) return problem;
  if (!with_float_type(output.type, [](auto) {})) return "takes floating-point numbers";
  return {};
}

Problem check_numbers(const Inputs& inputs, const View& output, const aclopAttr& attributes) {
  if (const Problem problem = check_one(inputs, output, attributes)) return problem;
  if (!with_number_type(output.type, [](auto) {})) return "does not take this type";
  return {};
}

// float32 in float32, so that a result is what the CPU provider's is; float16 through float32.
template <class T, class Function>
void run_one(const Inputs& inputs, const View& output, Function function) {
  for_each_element<T>(output, [&](T& out, std::size_t i) {
    store(out, function(load(element<T>(inputs[0], output, i))));
    return true;
  });
}

template <class Function>
Operator floats(Function function) {
  return {check_floats, [=](const Inputs& inputs, const View& output) -> Problem {
            with_float_type(output.type,
                            [&](auto type) { run_one<decltype(type)>(inputs, output, function); });
            return {};
          }};
}

template <class Function>
Operator numbers(Function function) {
  return {check_numbers, [=](const Inputs& inputs, const View& output) -> Problem {
            with_number_type(output.type,
                             [&](auto type) { run_one<decltype(type)>(inputs, output, function); });
            return {};
          }};
}

template <class T>
T negative(T x) {
  if constexpr (is_integer<T>) return wrapping(std::minus<>())(T{0}, x);
  return -x;
}

template <class T>
T absolute(T x) {
  if constexpr (!is_integer<T>) return std::fabs(x);
  return x < T{0} ? negative(x) : x;
}

}  // namespace

const Operators& elementwise_operators() {
  static const Operators operators = {
      {"Add", two(wrapping(std::plus<>()))},
      {"Sub", two(wrapping(std::minus<>()))},
      {"Mul", two(wrapping(std::multiplies<>()))},
      {"Div", two([](auto x, auto y) { return divided(x, y); }, true)},
      {"BroadcastToD", {check_broadcast, run_broadcast}},
      {"Neg", numbers([](auto x) { return negative(x); })},
      {"Abs", numbers([](auto x) { return absolute(x); })},
      {"Relu", numbers([](auto x) { return x < 0 ? decltype(x){0} : x; })},
      {"Sqrt", floats([](auto x) { return std::sqrt(x); })},
      {"Reciprocal", floats([](auto x) { return 1 / x; })},
      {"Exp", floats([](auto x) { return std::exp(x); })},
      {"Log", floats([](auto x) { return std::log(x); })},
      {"Erf", floats([](auto x) { return std::erf(x); })},
      {"Sin", floats([](auto x) { return std::sin(x); })},
      {"Cos", floats([](auto x) { return std::cos(x); })},
      {"Floor", floats([](auto x) { return std::floor(x); })},
      {"Ceil", floats([](auto x) { return std::ceil(x); })},
      {"Round", floats([](auto x) { return std::nearbyint(x); })},  // ties to even
  };
  return operators;
}

}  // namespace fake_acl

// The single operators, on memory that the host may touch.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tensor.h"

namespace fake_acl {

struct Tensor {
  aclDataType type;
  Dims dims;
  void* data;

  std::size_t count() const { return element_count(dims); }
};

struct Operator {
  // Inputs, output and attributes that it takes; the text says what is wrong. Runs at launch, as
  // the real compiler of single operators would.
  std::optional<std::string> (*check)(const std::vector<Tensor>& inputs, const Tensor& output,
                                      const aclopAttr& attributes);
  // An error text, if the values are such that the result is not defined.
  std::optional<std::string> (*run)(const std::vector<Tensor>& inputs, const Tensor& output);
};

// Null for a type that is not here.
const Operator* find_operator(const std::string& type);

// One table per file: pairs of a type and its operator.
struct NamedOperator {
  const char* type;
  Operator op;
};
const std::vector<NamedOperator>& elementwise_operators();
const std::vector<NamedOperator>& matrix_operators();
const std::vector<NamedOperator>& cast_operators();

// "inputs of 2 float32 [2,3], ...": what was given, for messages.
std::string describe(const std::vector<Tensor>& inputs, const Tensor& output);

// numpy's rule, aligned at the last dimension: whether `from` broadcasts to exactly `to`.
bool broadcasts(const Dims& from, const Dims& to);
// Where element `index` of a tensor of shape `to` comes from in one of shape `from`.
std::size_t broadcast_index(std::size_t index, const Dims& to, const Dims& from);

}  // namespace fake_acl

// The single operators.
#pragma once

#include <functional>
#include <map>

#include "element_types.h"
#include "tensor.h"

namespace fake_acl {

using Inputs = std::vector<View>;

struct Operator {
  // What is wrong with inputs, output and attributes. Runs at launch, as the real compiler of single
  // operators would.
  Problem (*check)(const Inputs& inputs, const View& output, const aclopAttr& attributes);
  // On a stream; a text, if the values are such that the result is not defined.
  std::function<Problem(const Inputs& inputs, const View& output)> run;
};

using Operators = std::map<std::string, Operator>;
const Operators& elementwise_operators();
const Operators& matrix_operators();
const Operators& cast_operators();

// numpy's rule, aligned at the last dimension: whether `from` broadcasts to exactly `to`.
bool broadcasts(const Dims& from, const Dims& to);
// Where element `index` of a tensor of shape `to` comes from in one of shape `from`.
std::size_t broadcast_index(std::size_t index, const Dims& to, const Dims& from);

}  // namespace fake_acl

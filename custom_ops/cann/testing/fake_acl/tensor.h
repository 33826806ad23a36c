// What ACL's opaque tensor types are here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "acl/acl_base.h"
#include "acl/acl_op.h"

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> dims;
};

struct aclDataBuffer {
  void* address;
  std::size_t bytes;
};

// Of any type: numbers, of which lists have more than one.
struct aclopAttr {
  std::map<std::string, std::vector<double>> numbers;
};

namespace fake_acl {

using Dims = std::vector<int64_t>;
using Problem = std::optional<std::string>;

std::size_t element_count(const Dims& dims);
std::string to_string(const Dims& dims);  // "[2,3]"
std::size_t bits_of(aclDataType type);    // 0 for a type that is not known

// A tensor of the device with strides, in elements. Two INT4 share a byte, the first is in its low bits.
struct View {
  aclDataType type;
  Dims dims, strides;
  int64_t offset;
  Dims storage;
  void* data;
  bool is_alive = true;

  std::size_t count() const { return element_count(dims); }
  std::size_t bytes() const { return (element_count(storage) * bits_of(type) + 7) / 8; }
  bool is_contiguous() const;
  std::string text() const;  // "float16[1,2]"
  // What is wrong unless it is in its storage, and that in a live block.
  Problem check_place() const;
  // Only on a stream: the storage, and elements in the order of their indices.
  void* host() const;
  std::vector<float> read() const;
  void write(const std::vector<float>& values) const;
};

using ViewRef = std::shared_ptr<View>;
struct Planned;
// Computes on a stream. Returns what is wrong with the values.
using Work = std::function<Problem(const Planned&)>;

// A call of an operator whose arguments were checked, but for their memory.
struct Planned {
  std::string name;
  std::vector<ViewRef> inputs, outputs;
  Work work;
  int error;  // of everything that is refused

  Problem check_places() const;
  aclError refuse(const std::string& what) const;
  // On a stream.
  aclError run() const;
};

}  // namespace fake_acl

// What ACL's opaque tensor types are here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
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

struct aclopAttr {
  std::map<std::string, bool> bools;
  std::map<std::string, int64_t> ints;
  std::map<std::string, float> floats;
  std::map<std::string, std::string> strings;
  std::map<std::string, std::vector<int64_t>> int_lists;
};

namespace fake_acl {

using Dims = std::vector<int64_t>;

std::size_t element_count(const Dims& dims);
std::string to_string(const Dims& dims);  // "[2,3]"
const char* name_of(aclDataType type);

}  // namespace fake_acl

// C++ types of ACL's element types.
#pragma once

#include <cstdint>
#include <type_traits>

#include "acl/acl_base.h"
#include "core/half.h"

namespace fake_acl {

// float16 in memory; computed with as float.
struct Half {
  uint16_t bits;
};

// What elements of T are computed in.
template <class T>
struct Compute {
  using type = T;
};
template <>
struct Compute<Half> {
  using type = float;
};
// bool in memory is a byte; adding or dividing those is in no operator.
struct Bool {
  uint8_t byte;
};
template <>
struct Compute<Bool> {
  using type = uint8_t;
};

template <class T>
typename Compute<T>::type load(T element) {
  return element;
}
inline float load(Half element) { return tq::half_to_float(element.bits); }
inline uint8_t load(Bool element) { return element.byte != 0; }

inline void store(Half& element, float value) { element.bits = tq::float_to_half(value); }
inline void store(Bool& element, uint8_t value) { element.byte = value != 0; }
template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
void store(T& element, T value) {
  element = value;
}

// Calls `work(T{})` with the C++ type. False for a type that is not listed.
template <class Work>
bool with_float_type(aclDataType type, Work&& work) {
  if (type == ACL_FLOAT) return work(float{}), true;
  if (type == ACL_FLOAT16) return work(Half{}), true;
  if (type == ACL_DOUBLE) return work(double{}), true;
  return false;
}

template <class Work>
bool with_number_type(aclDataType type, Work&& work) {
  if (type == ACL_INT8) return work(int8_t{}), true;
  if (type == ACL_INT16) return work(int16_t{}), true;
  if (type == ACL_INT32) return work(int32_t{}), true;
  if (type == ACL_INT64) return work(int64_t{}), true;
  if (type == ACL_UINT8) return work(uint8_t{}), true;
  if (type == ACL_UINT16) return work(uint16_t{}), true;
  if (type == ACL_UINT32) return work(uint32_t{}), true;
  if (type == ACL_UINT64) return work(uint64_t{}), true;
  return with_float_type(type, work);
}

template <class Work>
bool with_type(aclDataType type, Work&& work) {
  if (type == ACL_BOOL) return work(Bool{}), true;
  return with_number_type(type, work);
}

}  // namespace fake_acl

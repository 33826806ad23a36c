#include "tensor.h"

#include "counters.h"
#include "element_types.h"
#include "memory.h"

namespace fake_acl {
namespace {

struct Type {
  const char* name;
  std::size_t bits;
};

const Type& type_of(aclDataType type) {
  static const Type unknown{"a type the fake ACL runtime does not know", 0};
  static const std::map<aclDataType, Type> types = {
      {ACL_FLOAT, {"float32", 32}},  {ACL_FLOAT16, {"float16", 16}}, {ACL_BF16, {"bfloat16", 16}},
      {ACL_DOUBLE, {"float64", 64}}, {ACL_INT4, {"int4", 4}},        {ACL_INT8, {"int8", 8}},
      {ACL_INT16, {"int16", 16}},    {ACL_INT32, {"int32", 32}},     {ACL_INT64, {"int64", 64}},
      {ACL_UINT8, {"uint8", 8}},     {ACL_UINT16, {"uint16", 16}},   {ACL_UINT32, {"uint32", 32}},
      {ACL_UINT64, {"uint64", 64}},  {ACL_BOOL, {"bool", 8}},
  };
  const auto found = types.find(type);
  return found == types.end() ? unknown : found->second;
}

template <class Each>
void for_each_place(const View& view, Each&& each) {
  Dims index(view.dims.size(), 0);
  int64_t place = view.offset;
  for (std::size_t i = 0; i < view.count(); ++i) {
    each(i, place);
    for (std::size_t d = index.size(); d-- > 0;) {
      place += view.strides[d];
      if (++index[d] < view.dims[d]) break;
      place -= view.strides[d] * view.dims[d];
      index[d] = 0;
    }
  }
}

}  // namespace

std::size_t element_count(const Dims& dims) {
  std::size_t count = 1;
  for (const int64_t dim : dims) count *= static_cast<std::size_t>(dim);
  return count;
}

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (const int64_t dim : dims) {
    if (text.size() > 1) text += ",";
    text += std::to_string(dim);
  }
  return text + "]";
}

std::size_t bits_of(aclDataType type) { return type_of(type).bits; }

bool View::is_contiguous() const {
  int64_t stride = 1;
  for (std::size_t d = dims.size(); d-- > 0;) {
    if (dims[d] != 1 && strides[d] != stride) return false;
    stride *= dims[d];
  }
  return true;
}

std::string View::text() const { return type_of(type).name + to_string(dims); }

Problem View::check_place() const {
  int64_t last = offset;
  for (std::size_t d = 0; d < dims.size(); ++d) last += (dims[d] - 1) * strides[d];
  if (count() == 0) return {};
  if (offset < 0 || last >= static_cast<int64_t>(element_count(storage))) {
    return text() + " leaves its storage " + to_string(storage);
  }
  if (device_memory().is_live(data, bytes())) return {};
  return text() + " is not inside a live block: " + device_memory().describe(data);
}

void* View::host() const { return device_memory().alias(data); }

std::vector<float> View::read() const {
  std::vector<float> values(count());
  if (type == ACL_INT4) {
    for_each_place(*this, [&, from = static_cast<uint8_t*>(host())](std::size_t i, int64_t place) {
      const int code = from[place / 2] >> 4 * (place % 2) & 15;
      values[i] = static_cast<float>((code ^ 8) - 8);
    });
    return values;
  }
  with_type(type, [&](auto kind) {
    const auto* const from = static_cast<decltype(kind)*>(host());
    for_each_place(*this, [&](std::size_t i, int64_t place) {
      values[i] = static_cast<float>(load(from[place]));
    });
  });
  return values;
}

void View::write(const std::vector<float>& values) const {
  if (type == ACL_INT4) {
    for_each_place(*this, [&, to = static_cast<uint8_t*>(host())](std::size_t i, int64_t place) {
      const int shift = 4 * (place % 2), code = static_cast<int>(values[i]) & 15;
      to[place / 2] = static_cast<uint8_t>((to[place / 2] & ~(15 << shift)) | code << shift);
    });
    return;
  }
  with_type(type, [&](auto kind) {
    using T = decltype(kind);
    T* const to = static_cast<T*>(host());
    for_each_place(*this, [&](std::size_t i, int64_t place) {
      store(to[place], static_cast<typename Compute<T>::type>(values[i]));
    });
  });
}

Problem Planned::check_places() const {
  for (const auto* const views : {&inputs, &outputs}) {
    for (const ViewRef& view : *views) {
      const Problem problem = view->check_place();
      if (problem) return (views == &inputs ? ": input " : ": output ") + *problem;
    }
  }
  return {};
}

aclError Planned::refuse(const std::string& what) const {
  return fake_acl::refuse(error, "operator " + name + what);
}

aclError Planned::run() const {
  if (const Problem problem = check_places())
    return refuse(", when the stream came to it" + *problem);
  const Problem problem = work(*this);
  return problem ? refuse(" " + *problem) : ACL_SUCCESS;
}

}  // namespace fake_acl

using namespace fake_acl;

extern "C" {

size_t aclDataTypeSize(aclDataType dataType) { return bits_of(dataType) / 8; }

// ---- descriptions

aclTensorDesc* aclCreateTensorDesc(aclDataType dataType, int numDims, const int64_t* dims,
                                   aclFormat format) {
  if (numDims < 0 || (numDims > 0 && dims == nullptr) || format != ACL_FORMAT_ND) {
    refuse(ACL_ERROR_INVALID_PARAM, "aclCreateTensorDesc: " + std::to_string(numDims) +
                                        " dims in format " + std::to_string(format));
    return nullptr;
  }
  const Dims copied(dims, dims + numDims);
  for (const int64_t dim : copied) {
    if (dim >= 0) continue;
    refuse(ACL_ERROR_INVALID_PARAM, "aclCreateTensorDesc: dims " + to_string(copied));
    return nullptr;
  }
  return new aclTensorDesc{dataType, copied};
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }

size_t aclGetTensorDescSize(const aclTensorDesc* desc) {
  return element_count(desc->dims) * aclDataTypeSize(desc->type);
}

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* dimSize) {
  if (index >= desc->dims.size()) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclGetTensorDescDimV2: dim " + std::to_string(index) +
                                               " of " + to_string(desc->dims));
  }
  *dimSize = desc->dims[index];
  return ACL_SUCCESS;
}

// For operators of which none is here: that the constant is then not kept does no harm.
aclError aclSetTensorConst(aclTensorDesc*, void*, size_t) {
  FAKE_ACL_COUNT_CALL();
  set_recent_error("aclSetTensorConst: the fake ACL runtime has no operator with constants");
  return ACL_ERROR_FEATURE_UNSUPPORTED;
}

// ---- buffers

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
  return new aclDataBuffer{data, size};
}
aclError aclDestroyDataBuffer(const aclDataBuffer* dataBuffer) {
  delete dataBuffer;
  return ACL_SUCCESS;
}
void* aclGetDataBufferAddr(const aclDataBuffer* dataBuffer) { return dataBuffer->address; }

// ---- attributes

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }

aclError aclopSetAttrBool(aclopAttr* attr, const char* attrName, uint8_t attrValue) {
  return aclopSetAttrInt(attr, attrName, attrValue != 0);
}

aclError aclopSetAttrInt(aclopAttr* attr, const char* attrName, int64_t attrValue) {
  return aclopSetAttrListInt(attr, attrName, 1, &attrValue);
}

aclError aclopSetAttrFloat(aclopAttr* attr, const char* attrName, float attrValue) {
  attr->numbers[attrName] = {attrValue};
  return ACL_SUCCESS;
}

// No operator here has one.
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }

aclError aclopSetAttrListInt(aclopAttr* attr, const char* attrName, int numValues,
                             const int64_t* values) {
  attr->numbers[attrName].assign(values, values + numValues);
  return ACL_SUCCESS;
}

}  // extern "C"

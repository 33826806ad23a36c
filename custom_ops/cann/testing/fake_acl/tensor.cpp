#include "tensor.h"

#include "counters.h"

namespace fake_acl {

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

const char* name_of(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return "float32";
    case ACL_FLOAT16: return "float16";
    case ACL_BF16: return "bfloat16";
    case ACL_DOUBLE: return "float64";
    case ACL_INT8: return "int8";
    case ACL_INT16: return "int16";
    case ACL_INT32: return "int32";
    case ACL_INT64: return "int64";
    case ACL_UINT8: return "uint8";
    case ACL_UINT16: return "uint16";
    case ACL_UINT32: return "uint32";
    case ACL_UINT64: return "uint64";
    case ACL_BOOL: return "bool";
    default: return "a type the fake ACL runtime does not know";
  }
}

}  // namespace fake_acl

using namespace fake_acl;

extern "C" {

size_t aclDataTypeSize(aclDataType dataType) {
  switch (dataType) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL: return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16: return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32: return 4;
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64: return 8;
    default: return 0;
  }
}

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
  attr->bools[attrName] = attrValue != 0;
  return ACL_SUCCESS;
}

aclError aclopSetAttrInt(aclopAttr* attr, const char* attrName, int64_t attrValue) {
  attr->ints[attrName] = attrValue;
  return ACL_SUCCESS;
}

aclError aclopSetAttrFloat(aclopAttr* attr, const char* attrName, float attrValue) {
  attr->floats[attrName] = attrValue;
  return ACL_SUCCESS;
}

aclError aclopSetAttrString(aclopAttr* attr, const char* attrName, const char* attrValue) {
  attr->strings[attrName] = attrValue;
  return ACL_SUCCESS;
}

aclError aclopSetAttrListInt(aclopAttr* attr, const char* attrName, int numValues,
                             const int64_t* values) {
  attr->int_lists[attrName].assign(values, values + numValues);
  return ACL_SUCCESS;
}

}  // extern "C"

// Reading operator inputs: every violation becomes an error that names what was given and expected.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort/ort_abi.h"
#include "tq/operators.h"

namespace tq::ort {

// Carried to ONNX Runtime as a status; never crosses the C boundary itself.
class OpError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An error of ONNX Runtime's own, passed on as it is.
class RuntimeStatus : public std::exception {
 public:
  explicit RuntimeStatus(OrtStatus* status) : status_(status) {}
  OrtStatus* status() const { return status_; }

 private:
  OrtStatus* status_;
};

inline void check(OrtStatus* status) {
  if (status != nullptr) throw RuntimeStatus(status);
}

struct Tensor {
  const char* name;
  int type;
  std::vector<int64_t> dims;
  void* data;

  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

std::string text(const std::vector<int64_t>& dims);  // "[1, 8, 70, 66]"

Tensor read_tensor(const Api& api, const OrtValue* value, const char* name);
Tensor read_input(const Api& api, const OrtKernelContext* context, const char* op,
                  const spec::Input& input);

// No type where the optional input is absent.
Tensor read_optional(const Api& api, const OrtKernelContext* context, const spec::Input& input);

// What an input is for all calls; of no type where that is not known.
Tensor read_constant(const Api& api, const OrtKernelInfo* info, const spec::Input& input);

// An output, which the runtime allocates or the caller has bound; refused unless it is what was
// asked for, whatever the runtime checked.
Tensor make_output(const Api& api, OrtKernelContext* context, const char* op,
                   const spec::Output& output, int type, const std::vector<int64_t>& dims);

void expect_type(const char* op, const Tensor& tensor, int type);
void expect_rank(const char* op, const Tensor& tensor, size_t rank);
void expect_dims(const char* op, const Tensor& tensor, const std::vector<int64_t>& dims,
                 const char* why);

// The last dimension of a tensor of rank 4 as a head size that the codec has.
int expect_head_size(const char* op, const Tensor& tensor);

// The product of the dimensions times `bytes`, refused when it does not fit in 63 bits.
int64_t expect_fitting(const char* op, const char* name, const std::vector<int64_t>& dims,
                       int64_t bytes);

// One buffer for both caches of bytes, of one shape, is the in-place form; anything else in common
// is refused, since it would be overwritten while it is read.
void expect_apart(const char* op, const Tensor& past, const Tensor& present);

// Numbers of slots, one for all sequences or one each: none negative, none above `slots`.
// Returns the largest (0 without sequences).
int64_t check_lengths(const char* op, const Tensor& lengths, int64_t batch, int64_t slots,
                      const char* slots_of);

const char* type_name(int type);  // "float16"

// ---- attributes
int64_t read_int(const Api& api, const OrtKernelInfo* info, const char* op, const char* name);
// `otherwise` where the node has no such attribute.
int64_t read_int_or(const Api& api, const OrtKernelInfo* info, const char* name, int64_t otherwise);
std::vector<int64_t> read_ints(const Api& api, const OrtKernelInfo* info, const char* op,
                               const char* name);
float read_float(const Api& api, const OrtKernelInfo* info, const char* op, const char* name);
std::string read_string(const Api& api, const OrtKernelInfo* info, const char* op,
                        const char* name);

}  // namespace tq::ort

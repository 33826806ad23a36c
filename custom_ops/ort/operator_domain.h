// The operators of the library as a domain of ONNX Runtime.
#pragma once

#include <memory>
#include <vector>

#include "ort/ort_abi.h"

namespace tq::ort {

// Sessions keep pointers to the operators and to the domain: it has to outlive them.
class OperatorDomain {
 public:
  explicit OperatorDomain(const Api& api);
  ~OperatorDomain();
  OperatorDomain(const OperatorDomain&) = delete;
  OperatorDomain& operator=(const OperatorDomain&) = delete;

  OrtCustomOpDomain* get() const { return domain_; }

 private:
  template <class Kernel>
  void add(int float_type);
  void add_all(int float_type);

  const Api api_;
  OrtCustomOpDomain* domain_ = nullptr;
  std::vector<std::shared_ptr<const OrtCustomOp>> operators_;
};

}  // namespace tq::ort

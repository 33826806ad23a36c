// Which instruction sets are compiled in, which this processor has, and which one is used.
#pragma once

#include <string>
#include <vector>

#include "core/kernels.h"

namespace tq {

// Environment variable that forces one level.
inline constexpr char kIsaVariable[] = "TQ_ONNX_ISA";

// Best first.
std::vector<const Kernels*> compiled_kernels();
std::vector<const Kernels*> supported_kernels();

// The level called `name`, or the best one when `name` is null or empty; null, with a reason, when
// there is no such level on this machine.
const Kernels* find_kernels(const char* name, std::string& reason);

// Environment variable that chooses how products with codes are taken.
inline constexpr char kProductsVariable[] = "TQ_ONNX_PRODUCTS";

// The same level with the products called `name`: 8 bits of queries and weights, or float; its own
// where `name` is null or empty (8, or float of scalar); null, with a reason, for another
// name.
const Kernels* with_products(const Kernels& kernels, const char* name, std::string& reason);

}  // namespace tq

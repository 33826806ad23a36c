#include "ort/operator_domain.h"

#if defined(TQ_CANN)
#include "cann/host/decoder.h"
#include "cann/host/launch.h"
#include "cann/host/operators.h"
#endif
#include "ort/attention_op.h"
#include "ort/custom_op.h"
#include "ort/decoder_ops.h"
#include "ort/encode_op.h"
#include "tq/codec_spec.h"

namespace tq::ort {

OperatorDomain::OperatorDomain(const Api& api) : api_(api) {
  check(api_.create_custom_op_domain(spec::kDomain, &domain_));
  try {
    for (const int type : {kFloat, kFloat16, kBfloat16}) add_all(type);
  } catch (...) {
    api_.release_custom_op_domain(domain_);
    throw;
  }
}

OperatorDomain::~OperatorDomain() { api_.release_custom_op_domain(domain_); }

template <class Kernel>
void OperatorDomain::add(int float_type) {
  operators_.push_back(std::make_shared<const CustomOp<Kernel>>(float_type));
  check(api_.custom_op_domain_add(domain_, operators_.back().get()));
}

void OperatorDomain::add_all(int float_type) {
  add<EncodeKernel>(float_type);
  add<AttentionKernel>(float_type);
  add<PagedEncodeKernel>(float_type);
  add<PagedAttentionKernel>(float_type);
  add<DecoderKernel<spec::RmsNormalization>>(float_type);
  add<DecoderKernel<spec::RotaryEmbedding>>(float_type);
  add<DecoderKernel<spec::Swish>>(float_type);
  add<DecoderKernel<spec::Transpose>>(float_type);
  add<DecoderKernel<spec::Gather>>(float_type);
#if defined(TQ_CANN)
  // Of the same names, for another provider: a session without it does not look at them.
  add<cann::DrainOnError<cann::EncodeKernel>>(float_type);
  add<cann::DrainOnError<cann::AttentionKernel>>(float_type);
  add<cann::DrainOnError<cann::DecoderKernel<spec::RmsNormalization>>>(float_type);
  add<cann::DrainOnError<cann::DecoderKernel<spec::RotaryEmbedding>>>(float_type);
  add<cann::DrainOnError<cann::DecoderKernel<spec::Swish>>>(float_type);
  add<cann::DrainOnError<cann::DecoderKernel<spec::Transpose>>>(float_type);
  add<cann::DrainOnError<cann::DecoderKernel<spec::Gather>>>(float_type);
#endif
}

}  // namespace tq::ort

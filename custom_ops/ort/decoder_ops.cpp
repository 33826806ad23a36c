// Checked tensors to the core (core/decoder.h). What has no elements is done.
#include "ort/decoder_ops.h"

#include "core/decoder.h"
#include "tq/operators.h"

namespace tq::ort {

template <>
void DecoderKernel<spec::RmsNormalization>::compute(OrtKernelContext* context) {
  const RmsNormalizationTensors given = read_rms_normalization(api_, context, type_of(element_));
  if (given.rows == 0) return;
  const RmsNormalizationCall call{element_,   given.x.data, given.scale.data, given.y.data,
                                  given.rows, given.width,  epsilon_};
  Pool pool(api_, context);
  rms_normalization(kernels_, call, pool.parallel());
  pool.finish();
}

template <>
void DecoderKernel<spec::RotaryEmbedding>::compute(OrtKernelContext* context) {
  const RotaryEmbeddingTensors given = read_rotary_embedding(api_, context, type_of(element_));
  if (given.count == 0) return;
  RotaryEmbeddingCall call{};
  call.element = element_;
  call.x = given.x.data;
  call.cosines = given.cosines.as<float>();
  call.sines = given.sines.as<float>();
  call.positions = given.positions.as<int64_t>();
  call.positions_per_batch = given.positions.dims[0] != 1;
  call.y = given.y.data;
  call.batch = given.batch;
  call.heads = given.heads;
  call.tokens = given.tokens;
  call.head_size = given.head_size;
  Pool pool(api_, context);
  rotary_embedding(kernels_, call, pool.parallel());
  pool.finish();
}

template <>
void DecoderKernel<spec::Swish>::compute(OrtKernelContext* context) {
  const SwishTensors given = read_swish(api_, context, type_of(element_));
  Pool pool(api_, context);
  swish(kernels_, {element_, given.x.data, given.y.data, given.count}, pool.parallel());
  pool.finish();
}

template <>
void DecoderKernel<spec::Transpose>::compute(OrtKernelContext* context) {
  const TransposeTensors given = read_transpose(api_, context, type_of(element_));
  if (given.bytes == 0) return;
  const TransposeCall call{given.x.as<uint8_t>(), static_cast<uint8_t*>(given.y.data),
                           given.batch,           given.rows,
                           given.columns,         given.bytes};
  Pool pool(api_, context);
  transpose(call, pool.parallel());
  pool.finish();
}

template <>
void DecoderKernel<spec::Gather>::compute(OrtKernelContext* context) {
  const GatherTensors given = read_gather(api_, context, type_of(element_));
  if (given.bytes == 0) return;
  const GatherCall call{given.data.as<uint8_t>(),
                        given.indices.as<int64_t>(),
                        static_cast<uint8_t*>(given.y.data),
                        given.rows,
                        given.bytes,
                        given.count};
  Pool pool(api_, context);
  gather(call, pool.parallel());
  pool.finish();
}

}  // namespace tq::ort

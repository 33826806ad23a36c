// Our operators by CANN's own, aclnn.h: attention over codes that its kernel reads as they are, and what
// stands in where our kernels were not built.
//
// The codes are those of uniform_signed with 4 bits in planes: integers of -8..7 with a float32 scale
// for each token and head, as CANN's attention takes INT4 keys and values (antiquant mode 3). Its
// two numbers of a byte are coordinates 2 i and 2 i + 1, ours are i and i + D / 2: so the rotation has
// its columns in CANN's order, and everything between the two products is in that order.
#pragma once

#include <memory>
#include <mutex>

#include "cann/host/aclnn.h"
#include "cann/host/launch.h"
#include "ort/attention_inputs.h"
#include "ort/encode_inputs.h"

namespace tq::cann {

// A rotation [D, D] that is a constant, as float16 with its columns in CANN's order; made on the
// device by the first call.
class HalfRotation {
 public:
  HalfRotation(const Aclnn& aclnn, const void* constant) : aclnn_(aclnn), constant_(constant) {}

  const void* get(VendorCall& call, const ort::Tensor& rotation, const KernelLibrary& library,
                  void* stream);

 private:
  const Aclnn& aclnn_;
  const void* const constant_;
  std::mutex mutex_;
  std::unique_ptr<DeviceMemory> memory_;
};

// Slots first .. end - 1 of a sequence.
struct Slots {
  int64_t first, end;
};

// What CANN's attention gave over the codes in the middle of each sequence, between the sinks and the
// newest tokens, which can have entries: averages, float16 [B, H, D] in CANN's order, and the
// logarithms of sums of weights, float32 [B, H] with room for eight more. Null where there is none.
struct Middle {
  uint8_t *averages = nullptr, *logs = nullptr;
};

// Slots that the newest of `tokens` sees and that cannot have an entry.
Slots slots_of_codes(const ort::AttentionAttributes& attributes, int64_t past, int64_t padding,
                     int64_t tokens);

// Attention over the caches of one layer.
class VendorAttention {
 public:
  // Null where the node has something that CANN's attention cannot do, alone or, for exact tokens and
  // head sinks, beside our kernels.
  static std::unique_ptr<VendorAttention> of(const ort::Api& api, const OrtKernelInfo* info,
                                             const ort::AttentionAttributes& attributes,
                                             const KernelLibrary& library);

  const Aclnn& aclnn() const { return aclnn_; }

  // Returns whether the output is enqueued; if not our kernels attend, and join `middle` where that is
  // given. Codes are attended to as they are for one token. Prompts are attended to in float16, decoded;
  // and so is a token where CANN refused codes in this process, which is said on standard error, and
  // our kernels are missing.
  bool attend(VendorCall& vendor, const ort::AttentionTensors& call, Element element, void* stream,
              Middle& middle);

 private:
  void attend_whole(VendorCall& vendor, const ort::AttentionTensors& call, Element element,
                    void* stream, bool decodes);
  // What all sequences get, before it is rotated back; where it is joined, with the logarithms.
  Middle averages(VendorCall& vendor, const ort::AttentionTensors& call, Element element,
                  void* stream, bool decodes);

  VendorAttention(const Aclnn& aclnn, const KernelLibrary& library, const void* key_rotation,
                  const void* value_rotation, const ort::AttentionAttributes& attributes, bool joins)
      : aclnn_(aclnn), library_(library), attributes_(attributes), joins_(joins),
        key_rotation_(aclnn, key_rotation), value_rotation_(aclnn, value_rotation) {}

  const Aclnn& aclnn_;
  const KernelLibrary& library_;
  const ort::AttentionAttributes attributes_;
  const bool joins_;  // our kernels make the output
  HalfRotation key_rotation_, value_rotation_;
};

// New tokens by CANN's operators: codes are x / step, rounded, with step = max |x| / 7.
class VendorEncode {
 public:
  static std::unique_ptr<VendorEncode> of(const ort::Api& api, const OrtKernelInfo* info,
                                          spec::Codec codec, const Window& window,
                                          const KernelLibrary& library);

  void encode(const ort::Api& api, const OrtKernelContext* context, const ort::EncodeTensors& call,
              Element element, void* stream);

 private:
  VendorEncode(const Aclnn& aclnn, const KernelLibrary& library, const void* rotation,
               spec::Codec codec, const Window& window)
      : library_(library), aclnn_(aclnn), rotation_(aclnn, rotation), codec_(codec),
        overlay_rows_(window.overlay_rows) {}

  const KernelLibrary& library_;
  const Aclnn& aclnn_;
  HalfRotation rotation_;
  const spec::Codec codec_;
  const int64_t overlay_rows_;
};

}  // namespace tq::cann

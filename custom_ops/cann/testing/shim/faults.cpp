// Kernels that do one thing wrong each, and some that do not: what the shim must refuse. By name,
// for tests/cann/test_shim.py, which knows what it has to say of each.
#include <functional>
#include <map>
#include <string>

#include "kernel_operator.h"
#include "launch_queue.h"

using namespace AscendC;

namespace {

constexpr uint32_t kCount = 64;
using Buffer = TBuf<TPosition::VECCALC>;

// What the faulty kernels share: 64 floats of input and of output, 16 integers behind them.
struct Setup {
  explicit Setup(GM_ADDR memory) {
    in.SetGlobalBuffer((float*)memory, kCount);
    out.SetGlobalBuffer((float*)memory + kCount, kCount);
    pipe.InitBuffer(a_buffer, kCount * sizeof(float));
    pipe.InitBuffer(b_buffer, kCount * sizeof(float));
    a = a_buffer.Get<float>();
    b = b_buffer.Get<float>();
  }
  void load() {
    DataCopy(a, in, kCount);
    order<HardEvent::MTE2_V>();
  }
  void store() {
    order<HardEvent::V_MTE3>();
    DataCopy(out, b, kCount);
  }
  void fill() {
    Duplicate(b, 1.0f, kCount);
    order<HardEvent::V_MTE3>();
  }
  template <HardEvent E>
  static void order() {
    SetFlag<E>(EVENT_ID0);
    WaitFlag<E>(EVENT_ID0);
  }

  TPipe pipe;
  Buffer a_buffer, b_buffer;
  GlobalTensor<float> in, out;
  LocalTensor<float> a, b;
};

using Fault = std::function<void(Setup&)>;

const std::map<std::string, Fault>& faults() {
  static const std::map<std::string, Fault> all = {
      {"none",
       [](Setup& s) {
         s.load();
         Add(s.b, s.a, s.a, kCount);
         PipeBarrier<PIPE_V>();
         Muls(s.b, s.b, 2.0f, kCount);
         s.store();
       }},
      {"no MTE2_V",
       [](Setup& s) {
         DataCopy(s.a, s.in, kCount);
         Add(s.b, s.a, s.a, kCount);
         s.store();
       }},
      {"no V_MTE3",
       [](Setup& s) {
         s.load();
         Add(s.b, s.a, s.a, kCount);
         DataCopy(s.out, s.b, kCount);
       }},
      {"no barrier",
       [](Setup& s) {
         s.load();
         Add(s.b, s.a, s.a, kCount);
         Muls(s.b, s.b, 2.0f, kCount);
       }},
      {"no V_MTE2",
       [](Setup& s) {
         s.load();
         Add(s.b, s.a, s.a, kCount);
         DataCopy(s.a, s.in, kCount);
       }},
      {"no MTE3_V",
       [](Setup& s) {
         s.load();
         Add(s.b, s.a, s.a, kCount);
         s.store();
         Add(s.b, s.a, s.a, kCount);
       }},
      {"no V_S",
       [](Setup& s) {
         Duplicate(s.a, 1.0f, kCount);
         s.a.GetValue(0);
       }},
      {"no S_V",
       [](Setup& s) {
         s.load();
         Setup::order<HardEvent::V_S>();
         s.a.SetValue(3, 1.0f);
         Add(s.b, s.a, s.a, kCount);
       }},
      {"flags by a third pipe",
       [](Setup& s) {
         Duplicate(s.a, 1.0f, kCount);
         Setup::order<HardEvent::V_MTE2>();
         Setup::order<HardEvent::MTE2_V>();
         Add(s.b, s.a, s.a, kCount);
       }},
      {"never written",
       [](Setup& s) {
         Duplicate(s.a, 1.0f, kCount - 1);
         PipeBarrier<PIPE_V>();
         Add(s.b, s.a, s.a, kCount);
       }},
      {"beyond a buffer", [](Setup& s) { Duplicate(s.a, 1.0f, kCount + 1); }},
      {"scalar beyond a buffer", [](Setup& s) { s.a.SetValue(kCount, 1.0f); }},
      {"half a block", [](Setup& s) { DataCopy(s.a, s.in, 12); }},
      {"unaligned", [](Setup& s) { Duplicate(s.a[4], 1.0f, 8); }},
      {"no such memory",
       [](Setup& s) {
         s.in.SetGlobalBuffer((float*)&s, 8);
         DataCopy(s.a, s.in, 8);
       }},
      {"beyond a global tensor", [](Setup& s) { DataCopy(s.a, s.in[8], kCount); }},
      {"pieces",
       [](Setup& s) {
         s.load();
         s.fill();
         DataCopy(s.out, s.b, DataCopyParams{3, 2, 1, 1});  // to the last block of either
       }},
      {"pieces beyond a buffer",
       [](Setup& s) {
         s.fill();
         DataCopy(s.out, s.b, DataCopyParams{3, 2, 2, 0});
       }},
      {"pieces beyond a global tensor",
       [](Setup& s) {
         s.fill();
         DataCopy(s.out, s.b, DataCopyParams{3, 2, 0, 2});
       }},
      {"pieces without V_MTE3",
       [](Setup& s) {
         Duplicate(s.b, 1.0f, kCount);
         DataCopy(s.out, s.b, DataCopyParams{3, 2, 1, 1});
       }},
      {"too many pieces", [](Setup& s) { DataCopy(s.out, s.b, DataCopyParams{4096, 1, 0, 0}); }},
      {"empty pieces", [](Setup& s) { DataCopy(s.out, s.b, DataCopyParams{1, 0, 0, 0}); }},
      {"set twice",
       [](Setup&) {
         SetFlag<HardEvent::V_S>(EVENT_ID1);
         SetFlag<HardEvent::V_S>(EVENT_ID1);
         WaitFlag<HardEvent::V_S>(EVENT_ID1);
       }},
      {"never set", [](Setup&) { WaitFlag<HardEvent::V_S>(EVENT_ID1); }},
      {"left set", [](Setup&) { SetFlag<HardEvent::V_S>(EVENT_ID1); }},
      {"no such event",
       [](Setup&) {
         SetFlag<HardEvent::V_S>(8);
         WaitFlag<HardEvent::V_S>(8);
       }},
      {"too much UB",
       [](Setup& s) {
         Buffer large;
         s.pipe.InitBuffer(large, shim::kUbBytes);
       }},
      {"too many buffers",
       [](Setup& s) {
         Buffer more[shim::kMostBuffers - 1];  // beside two
         for (Buffer& buffer : more) s.pipe.InitBuffer(buffer, 32);
       }},
      {"overlapping stores",
       [](Setup& s) {
         s.load();
         Duplicate(s.b, 1.0f, kCount);
         s.store();
         DataCopy(s.out[8], s.b, 8);
       }},
      {"ordered stores",
       [](Setup& s) {
         s.load();
         Duplicate(s.b, 1.0f, kCount);
         s.store();
         PipeBarrier<PIPE_MTE3>();
         DataCopy(s.out[8], s.b, 8);
         Setup::order<HardEvent::MTE3_V>();
         Setup::order<HardEvent::V_MTE3>();
         DataCopy(s.out[8], s.b, 8);
       }},
      {"stores to one line",
       [](Setup& s) {
         s.fill();
         DataCopy(s.out[4], s.b, 8);
         DataCopy(s.out[12], s.b, 8);
       }},
      {"cores in one line",
       [](Setup& s) {
         s.fill();
         DataCopy(s.out[4 + 8 * static_cast<uint32_t>(GetBlockIdx())], s.b, 8);
       }},
      {"mask before repeats",  // the order of ReduceDataBlock, as CANN 9.1 calls it
       [](Setup& s) {
         s.load();
         BlockReduceSum(s.b, s.a, 64, 1, 1, 1, 8);
       }},
      {"repeats before mask",  // the order of WholeReduceSum is the other way round
       [](Setup& s) {
         s.load();
         WholeReduceSum(s.b, s.a, 1, 64, 1, 1, 8);
       }},
      {"gather beyond",
       [](Setup& s) {
         Duplicate(s.a, 1.0f, kCount);
         const auto offsets = s.b.ReinterpretCast<int32_t>();
         Duplicate(offsets, 256, 8);
         PipeBarrier<PIPE_V>();
         Buffer more;
         s.pipe.InitBuffer(more, 32);
         Gather(more.Get<float>(), s.a, offsets.ReinterpretCast<uint32_t>(), 0u, 8u);
       }},
      {"gather of too many repeats",  // the API has eight bits for their number
       [](Setup& s) {
         constexpr uint32_t kWhole = 256 * 64;
         Buffer offsets, results;
         s.pipe.InitBuffer(offsets, kWhole * sizeof(float));
         s.pipe.InitBuffer(results, kWhole * sizeof(float));
         Duplicate(s.a, 1.0f, kCount);
         Duplicate(offsets.Get<int32_t>(), 0, kWhole);
         PipeBarrier<PIPE_V>();
         Gather(results.Get<float>(), s.a, offsets.Get<uint32_t>(), 0u, kWhole);
       }},
      {"counts of the API",
       [](Setup& s) {
         Buffer bits, more;
         s.pipe.InitBuffer(bits, 32);
         s.pipe.InitBuffer(more, 2 * kCount * sizeof(float));
         s.load();
         CompareScalar(bits.Get<uint8_t>(), s.a, 0.0f, CMPMODE::GE, kCount);
         PipeBarrier<PIPE_V>();
         Select(s.b, bits.Get<uint8_t>(), s.a, 1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, kCount);
         const auto offsets = more.Get<int32_t>();
         Duplicate(offsets, 0, kCount + 8);
         PipeBarrier<PIPE_V>();
         Buffer picked;
         s.pipe.InitBuffer(picked, 2 * kCount * sizeof(float));
         Gather(picked.Get<float>(), s.b, offsets.ReinterpretCast<uint32_t>(), 0u, kCount + 8);
       }},
      {"large mask", [](Setup& s) { Add(s.b, s.a, s.a, 65, 1, {1, 1, 1, 8, 8, 8}); }},
      {"rounding of a cast",
       [](Setup& s) {
         const auto halves = s.a.ReinterpretCast<half>();
         Duplicate(halves, half(3), 32);
         PipeBarrier<PIPE_V>();
         Cast(s.b.ReinterpretCast<uint8_t>(), halves, RoundMode::CAST_RINT, 32);
       }},
      {"overlap",
       [](Setup& s) {
         Duplicate(s.a, 1.0f, kCount);
         PipeBarrier<PIPE_V>();
         Add(s.a, s.a[8], s.a[8], 16);
       }},
      {"reads its own",
       [](Setup& s) {
         Duplicate(s.a, 1.0f, kCount);
         PipeBarrier<PIPE_V>();
         Add(s.a[8], s.a, s.a, 8, 2, {1, 1, 1, 1, 1, 1});
       }},
      {"part of a comparison",
       [](Setup& s) {
         s.load();
         CompareScalar(s.b.ReinterpretCast<uint8_t>(), s.a, 0.0f, CMPMODE::GE, 32);
       }},
      {"cores write the same",
       [](Setup& s) {
         Duplicate(s.b, 1.0f, kCount);
         s.store();
       }},
      {"reads what is written",
       [](Setup& s) {
         s.load();
         s.fill();
         DataCopy(s.in[8], s.b, 8);
       }},
      {"loads what it stored",
       [](Setup& s) {
         s.fill();
         DataCopy(s.in, s.b, 8);
         DataCopy(s.a, s.in, 8);
       }},
      {"loads it behind a flag",
       [](Setup& s) {
         s.fill();
         DataCopy(s.in, s.b, 8);
         Setup::order<HardEvent::MTE3_MTE2>();
         DataCopy(s.a, s.in, 8);
       }},
#if __NPU_ARCH__ == 2201
      {"padding",
       [](Setup& s) {
         DataCopyPad(s.a, s.in, DataCopyExtParams{1, 36, 0, 0, 0},
                     DataCopyPadExtParams<float>{false, 0, 0, 0});
         Setup::order<HardEvent::MTE2_V>();
         Add(s.b, s.a, s.a, 10);
       }},
#endif
  };
  return all;
}

}  // namespace

extern "C" uint32_t tq_fault(const char* name, void* memory, uint32_t cores) {
  const Fault& fault = faults().at(name);
  return shim::launch(cores, nullptr, name, [&fault, memory] {
    Setup setup(static_cast<GM_ADDR>(memory));
    fault(setup);
  });
}

extern "C" uint32_t tq_faults(void) { return static_cast<uint32_t>(faults().size()); }

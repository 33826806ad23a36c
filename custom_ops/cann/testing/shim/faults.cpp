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

// What the faulty kernels share: 64 floats of input and of output, in UB `a` and `b`. Each step returns
// this, for the next one.
struct Setup {
  explicit Setup(GM_ADDR memory) {
    in.SetGlobalBuffer((float*)memory, kCount);
    out.SetGlobalBuffer((float*)memory + kCount, kCount);
    pipe.InitBuffer(a_buffer, kCount * sizeof(float));
    pipe.InitBuffer(b_buffer, kCount * sizeof(float));
    a = a_buffer.Get<float>();
    b = b_buffer.Get<float>();
  }
  // Anything: its arguments were computed.
  template <class... Done>
  Setup& then(Done&&...) {
    return *this;
  }
  template <HardEvent E>
  Setup& set(int32_t id = EVENT_ID0) {
    SetFlag<E>(id);
    return *this;
  }
  template <HardEvent E>
  Setup& wait(int32_t id = EVENT_ID0) {
    WaitFlag<E>(id);
    return *this;
  }
  template <HardEvent E>
  Setup& order() {
    return set<E>().template wait<E>();
  }
  template <pipe_t P>
  Setup& barrier() {
    PipeBarrier<P>();
    return *this;
  }
  Setup& copy_in(uint32_t count = kCount) {
    DataCopy(a, in, count);
    return *this;
  }
  Setup& load() { return copy_in().order<HardEvent::MTE2_V>(); }
  Setup& add() {
    Add(b, a, a, kCount);
    return *this;
  }
  Setup& twice() {
    Muls(b, b, 2.0f, kCount);
    return *this;
  }
  Setup& ones(const LocalTensor<float>& to, uint32_t count = kCount) {
    Duplicate(to, 1.0f, count);
    return *this;
  }
  Setup& copy_out(const GlobalTensor<float>& to, uint32_t count = 8) {
    DataCopy(to, b, count);
    return *this;
  }
  Setup& store() { return order<HardEvent::V_MTE3>().copy_out(out, kCount); }
  Setup& fill() { return ones(b).order<HardEvent::V_MTE3>(); }

  TPipe pipe;
  Buffer a_buffer, b_buffer;
  GlobalTensor<float> in, out;
  LocalTensor<float> a, b;
};

using Fault = std::function<void(Setup&)>;

const std::map<std::string, Fault>& faults() {
  constexpr auto V_S = HardEvent::V_S, V_MTE3 = HardEvent::V_MTE3;
  constexpr auto V_MTE2 = HardEvent::V_MTE2, MTE2_V = HardEvent::MTE2_V;
  constexpr auto MTE3_V = HardEvent::MTE3_V, MTE3_MTE2 = HardEvent::MTE3_MTE2;
  static const std::map<std::string, Fault> all = {
      {"none", [](Setup& s) { s.load().add().barrier<PIPE_V>().twice().store(); }},
      {"no MTE2_V", [](Setup& s) { s.copy_in().add().store(); }},
      {"no V_MTE3", [](Setup& s) { s.load().add().copy_out(s.out, kCount); }},
      {"no barrier", [](Setup& s) { s.load().add().twice(); }},
      {"no V_MTE2", [](Setup& s) { s.load().add().copy_in(); }},
      {"no MTE3_V", [](Setup& s) { s.load().add().store().add(); }},
      {"no V_S", [](Setup& s) { s.ones(s.a).then(s.a.GetValue(0)); }},
      {"no S_V",
       [](Setup& s) {
         s.load().order<V_S>();
         s.a.SetValue(3, 1.0f);
         s.add();
       }},
      {"flags by a third pipe",
       [](Setup& s) { s.ones(s.a).order<V_MTE2>().order<MTE2_V>().add(); }},
      {"never written", [](Setup& s) { s.ones(s.a, kCount - 1).barrier<PIPE_V>().add(); }},
      {"beyond a buffer", [](Setup& s) { s.ones(s.a, kCount + 1); }},
      {"scalar beyond a buffer", [](Setup& s) { s.a.SetValue(kCount, 1.0f); }},
      {"half a block", [](Setup& s) { s.copy_in(12); }},
      {"unaligned", [](Setup& s) { s.ones(s.a[4], 8); }},
      {"no such memory",
       [](Setup& s) {
         s.in.SetGlobalBuffer((float*)&s, 8);
         s.copy_in(8);
       }},
      {"beyond a global tensor", [](Setup& s) { DataCopy(s.a, s.in[8], kCount); }},
      {"set twice", [](Setup& s) { s.set<V_S>(1).set<V_S>(1).wait<V_S>(1); }},
      {"never set", [](Setup& s) { s.wait<V_S>(1); }},
      {"left set", [](Setup& s) { s.set<V_S>(1); }},
      {"no such event", [](Setup& s) { s.set<V_S>(8).wait<V_S>(8); }},
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
      {"overlapping stores", [](Setup& s) { s.load().ones(s.b).store().copy_out(s.out[8]); }},
      {"ordered stores",
       [](Setup& s) {
         s.load().ones(s.b).store().barrier<PIPE_MTE3>().copy_out(s.out[8]);
         s.order<MTE3_V>().order<V_MTE3>().copy_out(s.out[8]);
       }},
      {"stores to one line", [](Setup& s) { s.fill().copy_out(s.out[4]).copy_out(s.out[12]); }},
      {"cores in one line",
       [](Setup& s) { s.fill().copy_out(s.out[4 + 8 * static_cast<uint32_t>(GetBlockIdx())]); }},
      {"mask before repeats",  // the order of ReduceDataBlock, as CANN 9.1 calls it
       [](Setup& s) { BlockReduceSum(s.load().b, s.a, 64, 1, 1, 1, 8); }},
      {"gather beyond",
       [](Setup& s) {
         const auto offsets = s.ones(s.a).b.ReinterpretCast<int32_t>();
         Duplicate(offsets, 256, 8);
         Buffer more;
         s.barrier<PIPE_V>().pipe.InitBuffer(more, 32);
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
         Cast(s.barrier<PIPE_V>().b.ReinterpretCast<uint8_t>(), halves, RoundMode::CAST_RINT, 32);
       }},
      {"overlap", [](Setup& s) { Add(s.ones(s.a).barrier<PIPE_V>().a, s.a[8], s.a[8], 16); }},
      {"reads its own",
       [](Setup& s) {
         Add(s.ones(s.a).barrier<PIPE_V>().a[8], s.a, s.a, 8, 2, {1, 1, 1, 1, 1, 1});
       }},
      {"part of a comparison",
       [](Setup& s) {
         CompareScalar(s.load().b.ReinterpretCast<uint8_t>(), s.a, 0.0f, CMPMODE::GE, 32);
       }},
      {"cores write the same", [](Setup& s) { s.ones(s.b).store(); }},
      {"reads what is written", [](Setup& s) { s.load().fill().copy_out(s.in[8]); }},
      {"loads what it stored", [](Setup& s) { s.fill().copy_out(s.in).copy_in(8); }},
      {"loads it behind a flag",
       [](Setup& s) { s.fill().copy_out(s.in).order<MTE3_MTE2>().copy_in(8); }},
#if __NPU_ARCH__ == 2201
      {"padding",
       [](Setup& s) {
         DataCopyPad(s.a, s.in, DataCopyExtParams{1, 36, 0, 0, 0},
                     DataCopyPadExtParams<float>{false, 0, 0, 0});
         Add(s.order<MTE2_V>().b, s.a, s.a, 10);
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

// Streams and events: each stream is a thread with a queue, so what a caller forgets to wait for
// is really not there yet.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "acl/acl_base.h"

namespace fake_acl {

// What runs on a stream. An error is reported by the next synchronisation.
using Task = std::function<aclError()>;

class Stream {
 public:
  explicit Stream(uint32_t number);
  // Runs what is left.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void enqueue(Task task);
  // Until the queue is empty. Returns the first error since the last time.
  aclError synchronize();
  bool is_idle();

 private:
  void run();
  void wait_random_time();

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Task> queue_;
  bool stopping_ = false, busy_ = false;
  aclError error_ = 0;
  std::minstd_rand random_;
  uint32_t seed_generation_ = 0;
  const uint32_t number_;
  std::thread thread_;
};

using StreamRef = std::shared_ptr<Stream>;

// Null is the handle of the default stream. Returns null for an unknown handle.
StreamRef find_stream(aclrtStream handle);
aclrtStream create_stream();
// False for an unknown handle.
bool destroy_stream(aclrtStream handle);
// Every stream; the first error.
aclError synchronize_all();

// The n-th recording of an event is done when the stream comes to it. Tasks keep what they wait
// for alive, as a real event outlives its handle.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;

  uint64_t record();
  void finish(uint64_t recording);
  uint64_t last_recorded();
  void wait(uint64_t recording);
};

using EventRef = std::shared_ptr<Event>;

EventRef find_event(aclrtEvent handle);
aclrtEvent create_event();
bool destroy_event(aclrtEvent handle);

}  // namespace fake_acl

// Streams and events: each stream is a thread with a queue, so what a caller forgets to wait for
// is really not there yet.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "acl/acl_base.h"

namespace fake_acl {

// What runs on a stream. An error is reported by the next synchronisation.
using Task = std::function<aclError()>;

class Stream {
 public:
  Stream();
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
// When the last recording of an event is done. Tasks keep what they wait for alive, as a real event
// outlives its handle.
using Event = std::shared_future<void>;
using EventRef = std::shared_ptr<Event>;

// Handles that are valid now, with what they stand for. No handle is given twice, so one that was
// destroyed stays unknown, and none is an address that anyone could read.
template <class Thing>
class Handles {
 public:
  void* add(std::shared_ptr<Thing> thing) {
    const std::lock_guard<std::mutex> lock(mutex_);
    void* const handle = reinterpret_cast<void*>(kFirstHandle + next_++);
    things_[handle] = std::move(thing);
    return handle;
  }
  // Null for an unknown handle.
  std::shared_ptr<Thing> find(void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = things_.find(handle);
    return found == things_.end() ? nullptr : found->second;
  }
  // What a known handle stands for from now on; returns what it stood for.
  std::shared_ptr<Thing> set(void* handle, std::shared_ptr<Thing> thing) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = things_.find(handle);
    return found == things_.end() ? nullptr : std::exchange(found->second, std::move(thing));
  }
  std::shared_ptr<Thing> remove(void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = things_.extract(handle);
    return found.empty() ? nullptr : found.mapped();
  }
  std::vector<std::shared_ptr<Thing>> all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Thing>> things;
    for (const auto& [handle, thing] : things_) things.push_back(thing);
    return things;
  }

 private:
  static constexpr std::uintptr_t kFirstHandle = std::uintptr_t{0xFAC1} << 48;

  std::mutex mutex_;
  std::uintptr_t next_ = 0;
  std::map<void*, std::shared_ptr<Thing>> things_;
};

Handles<Stream>& streams();
Handles<Event>& events();
// Null is the handle of the default stream. Returns null for an unknown handle.
StreamRef find_stream(aclrtStream handle);

}  // namespace fake_acl

#include "streams.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "counters.h"
#include "fake_acl.h"

namespace fake_acl {
namespace {

// Read by every stream before each task.
struct Delay {
  std::atomic<uint32_t> microseconds{environment_number("TQ_FAKE_ACL_DELAY_US", 0)};
  std::atomic<uint32_t> seed{environment_number("TQ_FAKE_ACL_SEED", 1)};
  std::atomic<uint32_t> generation{1};  // of the seed
};

Delay& delay() {
  static Delay* const instance = new Delay;
  return *instance;
}

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
  std::shared_ptr<Thing> find(void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = things_.find(handle);
    return found == things_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Thing> remove(void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = things_.find(handle);
    if (found == things_.end()) return nullptr;
    std::shared_ptr<Thing> thing = std::move(found->second);
    things_.erase(found);
    return thing;
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

Handles<Stream>& streams() {
  static Handles<Stream>* const instance = new Handles<Stream>;
  return *instance;
}

Handles<Event>& events() {
  static Handles<Event>* const instance = new Handles<Event>;
  return *instance;
}

std::atomic<uint32_t> next_stream{1};

aclrtStream default_stream() {
  static const aclrtStream handle = streams().add(std::make_shared<Stream>(0));
  return handle;
}

}  // namespace

Stream::Stream(uint32_t number) : number_(number), thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Stream::enqueue(Task task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(task));
  }
  wake_.notify_one();
}

aclError Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
  return std::exchange(error_, 0);
}

bool Stream::is_idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    wait_random_time();
    const aclError error = task();
    lock.lock();
    if (error_ == 0) error_ = error;
    busy_ = false;
    if (queue_.empty()) idle_.notify_all();
  }
}

void Stream::wait_random_time() {
  const uint32_t most = delay().microseconds;
  if (most == 0) return;
  const uint32_t generation = delay().generation;
  if (seed_generation_ != generation) {
    seed_generation_ = generation;
    random_.seed(delay().seed + 7919 * number_);
  }
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
}

StreamRef find_stream(aclrtStream handle) {
  return streams().find(handle == nullptr ? default_stream() : handle);
}

aclrtStream create_stream() { return streams().add(std::make_shared<Stream>(next_stream++)); }

bool destroy_stream(aclrtStream handle) {
  const StreamRef stream = streams().remove(handle);
  if (stream == nullptr) return false;
  if (!stream->is_idle()) counters().violation("a stream was destroyed before its tasks were done");
  return true;
}

aclError synchronize_all() {
  aclError error = 0;
  for (const StreamRef& stream : streams().all()) {
    const aclError one = stream->synchronize();
    if (error == 0) error = one;
  }
  return error;
}

uint64_t Event::record() {
  const std::lock_guard<std::mutex> lock(mutex);
  return ++recorded;
}

void Event::finish(uint64_t recording) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (done < recording) done = recording;
  }
  changed.notify_all();
}

uint64_t Event::last_recorded() {
  const std::lock_guard<std::mutex> lock(mutex);
  return recorded;
}

void Event::wait(uint64_t recording) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return done >= recording; });
}

EventRef find_event(aclrtEvent handle) { return events().find(handle); }
aclrtEvent create_event() { return events().add(std::make_shared<Event>()); }
bool destroy_event(aclrtEvent handle) { return events().remove(handle) != nullptr; }

}  // namespace fake_acl

extern "C" {

int fake_acl_enqueue(void* stream, const char* name, int (*task)(void*), void* argument) {
  const fake_acl::StreamRef found = fake_acl::find_stream(stream);
  if (found == nullptr) {
    return fake_acl::refuse(ACL_ERROR_INVALID_PARAM,
                            std::string("kernel ") + name + ": unknown stream");
  }
  fake_acl::counters().add(std::string("kernel.") + name);
  found->enqueue([task, argument] { return task(argument); });
  return ACL_SUCCESS;
}

void fake_acl_set_delay(uint32_t microseconds, uint32_t seed) {
  fake_acl::delay().seed = seed;
  ++fake_acl::delay().generation;
  fake_acl::delay().microseconds = microseconds;
}

}  // extern "C"

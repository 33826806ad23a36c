#include "streams.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

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

std::atomic<uint32_t> next_stream{0};

}  // namespace

Stream::Stream() : number_(next_stream++), thread_([this] { run(); }) {}

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
  const uint32_t time = delay().seed == 0 ? most : random_() % most;
  std::this_thread::sleep_for(std::chrono::microseconds(time));
}

Handles<Stream>& streams() {
  static Handles<Stream>* const instance = new Handles<Stream>;
  return *instance;
}

Handles<Event>& events() {
  static Handles<Event>* const instance = new Handles<Event>;
  return *instance;
}

StreamRef find_stream(aclrtStream handle) {
  static const aclrtStream otherwise = streams().add(std::make_shared<Stream>());
  return streams().find(handle == nullptr ? otherwise : handle);
}

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

// Threads that take the tasks of tests. They live until the program ends: emulators keep some
// memory for every thread that ever began.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace tq::test {

// Calls from several threads at a time take turns by shares of their tasks.
class Workers {
 public:
  explicit Workers(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Workers() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Runs task(argument, i) for i in [0, count), on at most `shares` threads.
  void run(void (*task)(void*, std::size_t), std::size_t count, void* argument, int shares) {
    Job job{task, argument, count, {0}, shares};
    std::unique_lock<std::mutex> lock(mutex_);
    for (int i = 0; i < shares; ++i) waiting_.push_back(&job);
    changed_.notify_all();
    changed_.wait(lock, [&] { return job.shares == 0; });
  }

 private:
  struct Job {
    void (*task)(void*, std::size_t);
    void* argument;
    std::size_t count;
    std::atomic<std::size_t> next;
    int shares;  // that have not ended
  };

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Job& job = *waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      for (std::size_t i = job.next++; i < job.count; i = job.next++) job.task(job.argument, i);
      lock.lock();
      if (--job.shares == 0) changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job*> waiting_;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tq::test

// The interface to the threads of the caller, over which the core spreads its work.
#pragma once

#include <cstddef>

namespace tq {

// Runs `task(argument, i)` for i in [0, count), in any order, possibly at the same time.
struct Parallel {
  void (*run)(void* context, void (*task)(void* argument, std::size_t index), std::size_t count,
              void* argument);
  void* context;

  template <class Task>
  void operator()(std::size_t count, Task& task) const {
    if (count == 0) return;
    if (count == 1) {
      task(0);
      return;
    }
    run(
        context, [](void* argument, std::size_t index) { (*static_cast<Task*>(argument))(index); },
        count, &task);
  }
};

}  // namespace tq

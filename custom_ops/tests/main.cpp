// Runs the registered cases and reports counts; fails when a check fails or nothing ran.
#include <cstring>

#include "core/dispatch.h"
#include "tests/testing.h"

namespace tq::test {

long checks = 0;
long failures = 0;

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

}  // namespace tq::test

// Runs every case, or those whose name contains the first argument.
int main(int argc, char** argv) {
  using namespace tq::test;
  std::printf("levels:");
  for (const tq::Kernels* level : tq::supported_kernels()) std::printf(" %s", level->name);
  std::printf("\n");
  int run = 0;
  for (const Case& one : cases()) {
    if (argc > 1 && std::strstr(one.name, argv[1]) == nullptr) continue;
    const long before = checks;
    one.body();
    std::printf("%-44s %ld checks\n", one.name, checks - before);
    ++run;
  }
  std::printf("%d cases, %ld checks, %ld failures\n", run, checks, failures);
  return failures == 0 && run > 0 ? 0 : 1;
}

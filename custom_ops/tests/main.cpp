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

// Whether a case is asked for: all are without an argument; with one, the case of that name, or else
// those whose name contains it.
static bool is_asked_for(const char* name, const char* argument) {
  if (argument == nullptr || std::strcmp(name, argument) == 0) return true;
  for (const tq::test::Case& one : tq::test::cases()) {
    if (std::strcmp(one.name, argument) == 0) return false;
  }
  return std::strstr(name, argument) != nullptr;
}

// Runs cases; with --list, prints the names of all.
int main(int argc, char** argv) {
  using namespace tq::test;
  const char* const argument = argc > 1 ? argv[1] : nullptr;
  if (argument != nullptr && std::strcmp(argument, "--list") == 0) {
    for (const Case& one : cases()) std::printf("%s\n", one.name);
    return 0;
  }
  std::printf("levels:");
  for (const tq::Kernels* level : tq::supported_kernels()) std::printf(" %s", level->name);
  std::printf("\n");
  int run = 0;
  for (const Case& one : cases()) {
    if (!is_asked_for(one.name, argument)) continue;
    const long before = checks;
    one.body();
    std::printf("%-44s %ld checks\n", one.name, checks - before);
    ++run;
  }
  std::printf("%d cases, %ld checks, %ld failures\n", run, checks, failures);
  return failures == 0 && run > 0 ? 0 : 1;
}

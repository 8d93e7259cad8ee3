// The tests of the core in one program, as sanitizers take long to compile what they have in common.
// allocation_test.cpp counts what is allocated, so it is a program of its own. tests/native/build.py builds both. Run:
// programs NAME [number of programs] [first seed]
#include <cstdio>
#include <map>
#include <string>

#include "copy_engine_test.cpp"
#include "core_stub_test.cpp"
#include "exchange_test.cpp"
#include "mixed_test.cpp"
#include "shared_memory_test.cpp"

int main(int argc, char** argv) {
  using namespace fastpipe::testing;
  const std::map<std::string, int (*)(int, char**)> tests = {{"copy_engine_test", copy_engine_test::run},
                                                             {"core_stub_test", core_stub_test::run},
                                                             {"exchange_test", exchange_test::run},
                                                             {"mixed_test", mixed_test::run},
                                                             {"shared_memory_test", shared_memory_test::run}};
  const auto found = argc > 1 ? tests.find(argv[1]) : tests.end();
  if (found == tests.end()) {
    std::fprintf(stderr, "name one of the tests in programs.cpp\n");
    return 2;
  }
  return found->second(argc - 1, argv + 1);
}

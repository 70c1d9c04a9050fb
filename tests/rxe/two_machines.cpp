// One of two emulated machines: its two ranks reach those of the other one over RoCE. Usage: deep_ep_rxe_machine ID
// PEER_ADDRESS
#include <cstdio>
#include <exception>
#include <string>

#include "tests/rxe/machine_ranks.hpp"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: deep_ep_rxe_machine 0|1 PEER_ADDRESS\n");
    return 2;
  }
  const int id = std::string(argv[1]) == "0" ? 0 : 1;
  try {
    deep_ep::test::run_machine_ranks(id, argv[2]);
    std::printf("machine %d: two ranks reach those of the other machine, by hand and in calls\n", id);
    return 0;
  } catch (const std::exception& error) {
    std::printf("machine %d: FAILED: %s\n", id, error.what());
    return 1;
  }
}

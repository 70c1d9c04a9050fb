// What libibverbs and libmlx5 were found to be on this machine. No verbs types: any part of the library may ask.
#pragma once

#include <string>
#include <vector>

namespace deep_ep::rdma::verbs {

/// One library that was opened at run time, or could not be.
struct LoadedLibrary {
  std::string name;            ///< "libibverbs.so.1"
  bool usable = false;         ///< opened, and no symbol that is needed is missing
  std::string path = {};       ///< the file, symbolic links resolved; empty when it was not opened
  std::string rdma_core = {};  ///< its release, by the file's name: "44.0"; may be empty
  std::string error = {};      ///< why it is not usable
};

struct LibraryReport {
  LoadedLibrary verbs;
  LoadedLibrary mlx5;
};

/// Opens both libraries, unless that has happened, and says how it went. Never throws for a missing library.
LibraryReport report_libraries();

/// SystemError, with what to install, unless libibverbs can be used.
void require_libraries();

/// One line for each library, for logs and `deep_ep doctor`.
std::vector<std::string> describe(const LibraryReport& report);

/// The rdma-core release in a library's file name: "44.0" of libibverbs.so.1.14.44.0. Empty if there is none.
std::string rdma_core_of_file(const std::string& path);

}  // namespace deep_ep::rdma::verbs

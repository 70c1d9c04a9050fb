// What libibverbs and libmlx5 were found to be on this machine. No verbs types: any part of the library may ask.
#pragma once

#include <string>
#include <vector>

namespace deep_ep::rdma::verbs {

/// One library that was opened at run time, or could not be.
struct LoadedLibrary {
  std::string name;        ///< "libibverbs.so.1"
  std::string path = {};   ///< the file, symbolic links resolved: its name has the release; empty: it was not opened
  std::string error = {};  ///< why it cannot be used: it was not opened, or lacks symbols; empty: it can

  bool usable() const { return error.empty(); }
  std::string text() const;  ///< one line for logs and `deep_ep doctor`
};

/// libibverbs and libmlx5, opened unless that has happened. Never throws for a missing library.
std::vector<LoadedLibrary> report_libraries();

}  // namespace deep_ep::rdma::verbs

// The checks of `deep_ep doctor`. Each reads the machine's files and the variables it is given, nothing else, so tests
// examine machines that exist only as files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/rdma/discovery/nic_map.hpp"
#include "csrc/rdma/discovery/nics.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/topology/gpus.hpp"
#include "csrc/topology/system_root.hpp"
#include "tools/doctor/report.hpp"

namespace deep_ep::tools {

/// The build of this program, as far as machines differ in it.
struct BuiltFor {
  std::string cuda;                        ///< "12.9.86"; empty: without CUDA
  std::vector<std::string> architectures;  ///< in CMake's words: "90a-real", "100-real", "90-virtual"
};

/// A machine, read once.
struct Patient {
  topology::SystemRoot root;
  deep_ep::environment::Source environment;
  std::vector<std::string> variable_names;  ///< of those that are set
  std::vector<topology::Gpu> gpus;
  std::vector<rdma::Nic> nics;
  rdma::RdmaSettings settings;  ///< the defaults where a variable of the library's own is wrong
  rdma::NicMap map;
  BuiltFor build;
};
/// `names`: of the variables that are set.
Patient examine(topology::SystemRoot root, environment::Source variables, const std::vector<std::string>& names);

/// A variable of the table, and its value.
struct Assignment {
  const environment::Variable* variable;
  environment::Value value;  ///< in the words of the table
  std::string name;          ///< the variable that is set, or has the default
  std::string text;          ///< its value, in its own words
  std::string source;        ///< "set", "stands for DEEP_EP_RDMA_TRAFFIC_CLASS", "detected: ...", "default"
  std::string problem;       ///< why the library refuses it, or which variables of others it does not understand

  bool refused() const { return source.empty(); }
};
/// One for each variable of the table, in its order.
std::vector<Assignment> assignments_of(const Patient& patient);

struct Check {
  std::string_view id;       ///< "D5": documents and scripts may rely on it
  std::string_view title;    ///< "GIDs"
  std::string_view meaning;  ///< why it matters: "so that ..."
  std::string_view absent;   ///< why it is skipped where it finds nothing to say; of a command: how to ask for it
  void (*run)(const Patient& patient, Findings& findings) = nullptr;  ///< null where it is another command's
  bool rdma_only = false;  ///< its errors stop transfers between machines, and nothing else
  bool slow = false;       ///< reads large files
};
/// In the order of their numbers.
std::span<const Check> all_checks();

/// All of them that are no commands. A check that finds nothing to say gets a finding that says so, and so does a slow
/// one that `quickly` leaves out.
Findings run_checks(const Patient& patient, bool quickly = false);

/// The worst verdict of a check's findings; `skip` where there are none.
Verdict verdict_of(const Check& check, const Findings& findings);

/// The meaning of all findings for a run on this machine, and the checks that decide it.
struct Overall {
  std::string verdict;  ///< "works", "works with limits" or "does not work"
  std::vector<std::string> decided_by;
  std::string text;  ///< the last line of the report
};
Overall overall_of(const Patient& patient, const Findings& findings);

const char* word_of(Verdict verdict);  ///< of a whole check: "ok", "warn", "fail" or "skip"
/// A line for each check: number, verdict, title, and of a skipped one why.
std::string checks_text(const Findings& findings);
nlohmann::json checks_json(const Findings& findings);

/// `--quick`, for readiness probes: is this machine usable? From small files alone, in one line.
struct QuickOptions {
  int gpus = 0;  ///< as many must be there at least
  int nics = 0;  ///< as many RDMA devices must be usable at least
};
struct QuickAnswer {
  bool usable = false;
  std::string line;
  Findings findings;
};
QuickAnswer answer_quickly(const Patient& patient, const QuickOptions& options);

// The checks, by the numbers of all_checks().

void check_driver(const Patient& patient, Findings& findings);
void check_gpus(const Patient& patient, Findings& findings);
void check_limits(const Patient& patient, Findings& findings);
void check_nics(const Patient& patient, Findings& findings);
void check_gids(const Patient& patient, Findings& findings);
void check_map(const Patient& patient, Findings& findings);
void check_libraries(const Patient& patient, Findings& findings);
void check_registration(const Patient& patient, Findings& findings);
void check_doorbell(const Patient& patient, Findings& findings);
void check_device_files(const Patient& patient, Findings& findings);
void check_gke(const Patient& patient, Findings& findings);
void check_variables(const Patient& patient, Findings& findings);

/// 580 of "580.126.09"; 0 of what is no number.
int major_of(std::string_view version);
/// The bits CAP_... of what this process may do; 0 where the files do not say.
std::uint64_t capabilities_of_process(const topology::SystemRoot& root);

/// Variables of other libraries that users bring along, and that the library does not read.
struct ForeignVariable {
  const char* names;  ///< divided by spaces
  const char* meaning;
  const char* action = "";
  Verdict verdict = Verdict::note;  ///< of the doctor where it is set; skip: nothing to say
};
std::span<const ForeignVariable> foreign_variables();

/// One copy of a library in a folder where the loader looks, or might after a change of LD_LIBRARY_PATH.
struct LibraryCopy {
  std::string folder;
  std::string file;            ///< "libibverbs.so.1.14.50.0", links followed
  std::string private_abi;     ///< "34" of IBVERBS_PRIVATE_34: both libraries must have the same
  std::string provider_files;  ///< libibverbs: ".../libibverbs/lib%s-rdmav34.so", where it looks for drivers
  bool searched = false;       ///< the loader looks here with the variables as they are
};
/// All copies of `name` ("libibverbs.so.1"), in the order of the search.
std::vector<LibraryCopy> find_library(const Patient& patient, const std::string& name);

}  // namespace deep_ep::tools

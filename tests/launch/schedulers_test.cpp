#include "tools/launch/schedulers.hpp"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

using Variables = std::map<std::string, std::string, std::less<>>;

Place find(const std::string& scheduler, const Variables& variables) {
  return find_place(scheduler, [&](std::string_view name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

/// The text with which it is refused.
std::string refusal(const std::string& scheduler, const Variables& variables) {
  try {
    find(scheduler, variables);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

void expect_place(const Place& place, const std::string& scheduler, int node, int nodes, const std::string& master,
                  int port) {
  EXPECT_EQ(place.scheduler, scheduler);
  EXPECT_EQ(place.node, node);
  EXPECT_EQ(place.nodes, nodes);
  EXPECT_EQ(place.master, master);
  EXPECT_EQ(place.port, port);
  EXPECT_FALSE(place.is_rank);
}

void expect_refusal(const std::string& scheduler, const Variables& variables,
                    std::initializer_list<const char*> texts) {
  const std::string text = refusal(scheduler, variables);
  for (const char* part : texts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

const Variables kJob = {
    {"JOB_COMPLETION_INDEX", "1"}, {"DEEP_EP_NODES", "2"}, {"MASTER_ADDR", "ep-0.ep"}, {"MASTER_PORT", "29400"}};
const Variables kSlurm = {{"SLURM_NODEID", "2"}, {"SLURM_NNODES", "3"}, {"SLURM_STEP_NUM_NODES", "3"},
                          {"SLURM_NTASKS", "3"}, {"SLURM_PROCID", "2"}, {"SLURM_JOB_NODELIST", "gpu[07-08],gpu11"},
                          {"SLURM_LOCALID", "0"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                            {"MASTER_ADDR", "node0"}};
const Variables kNodes = {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "8361"}};
const Variables kTorchrun = {{"RANK", "9"},        {"WORLD_SIZE", "16"},
                             {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "8"},
                             {"MASTER_ADDR", "a"}, {"TORCHELASTIC_RUN_ID", "x"}};

Variables both(Variables one, const Variables& other) {
  for (const auto& [name, value] : other) one[name] = value;
  return one;
}
Variables with(Variables one, const std::string& name, const std::string& value) {
  one[name] = value;
  return one;
}
Variables without(Variables one, const std::string& name) {
  one.erase(name);
  return one;
}

TEST(Schedulers, EachIsUnderstoodByNameAndByItsVariables) {
  for (const char* word : {"indexed-job", "jobset", "auto"}) {
    expect_place(find(word, kJob), word == std::string("auto") ? "indexed-job" : word, 1, 2, "ep-0.ep", 29400);
  }
  for (const char* word : {"slurm", "auto"}) expect_place(find(word, kSlurm), "slurm", 2, 3, "gpu07", 0);
  for (const char* word : {"mpi", "auto"}) expect_place(find(word, kOpenMpi), "mpi", 1, 2, "node0", 0);
  for (const char* word : {"nodes", "auto"}) expect_place(find(word, kNodes), "nodes", 1, 4, "10.0.0.1", 8361);
  for (const char* word : {"torchrun", "auto"}) EXPECT_TRUE(find(word, kTorchrun).is_rank);
}

TEST(Schedulers, OtherMpisAndStepsOfSlurm) {
  const Variables mpich = {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "1"}, {"MASTER_ADDR", "a"}};
  expect_place(find("auto", mpich), "mpi", 0, 2, "a", 0);
  // A step on two of the job's three nodes.
  const Variables step = both(kSlurm, {{"SLURM_NODEID", "1"},
                                       {"SLURM_STEP_NUM_NODES", "2"},
                                       {"SLURM_STEP_NUM_TASKS", "2"},
                                       {"SLURM_STEP_NODELIST", "gpu[08,11]"}});
  expect_place(find("slurm", step), "slurm", 1, 2, "gpu08", 0);
  expect_place(find("slurm", with(step, "MASTER_ADDR", "10.1.1.1")), "slurm", 1, 2, "10.1.1.1", 0);
}

TEST(Schedulers, OneNodeNeedsNoMaster) {
  expect_place(find("auto", {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}), "mpi", 0, 1, "127.0.0.1",
               0);
  expect_place(find("auto", {{"JOB_COMPLETION_INDEX", "0"}, {"DEEP_EP_NODES", "1"}}), "indexed-job", 0, 1, "127.0.0.1",
               0);
}

TEST(Schedulers, WhatIsMissingIsNamed) {
  expect_refusal("auto", {}, {"JOB_COMPLETION_INDEX", "SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "WORLD_SIZE"});
  expect_refusal("auto", without(kJob, "DEEP_EP_NODES"), {"indexed-job: DEEP_EP_NODES is not set"});
  expect_refusal("jobset", without(kJob, "JOB_COMPLETION_INDEX"), {"jobset: JOB_COMPLETION_INDEX is not set"});
  expect_refusal("auto", without(kJob, "MASTER_ADDR"), {"MASTER_ADDR is not set", "JOB-0.SERVICE"});
  expect_refusal("slurm", without(kSlurm, "SLURM_NODEID"), {"SLURM_NODEID is not set", "srun"});
  expect_refusal("mpi", without(kOpenMpi, "MASTER_ADDR"), {"MASTER_ADDR is not set", "mpirun -x"});
  expect_refusal("torchrun", without(kTorchrun, "LOCAL_RANK"), {"LOCAL_RANK is not set"});
}

TEST(Schedulers, ABatchScriptStartsNoLaunchersByItself) {
  const Variables batch = with(without(kSlurm, "SLURM_STEP_NUM_NODES"), "SLURM_NODEID", "0");
  for (const char* word : {"slurm", "auto"})
    expect_refusal(word, batch, {"3 nodes", "SLURM_STEP_NUM_NODES", "by srun"});
  const Variables alone = both(batch, {{"SLURM_NNODES", "1"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_NODELIST", "gpu07"}});
  expect_place(find("slurm", alone), "slurm", 0, 1, "gpu07", 0);
}

TEST(Schedulers, WrongNumbersAreRefused) {
  expect_refusal("auto", with(kJob, "JOB_COMPLETION_INDEX", "2"), {"JOB_COMPLETION_INDEX='2', allowed: 0 to 1"});
  expect_refusal("auto", with(kJob, "DEEP_EP_NODES", "two"), {"DEEP_EP_NODES='two', allowed: 1 to"});
  expect_refusal("auto", with(kJob, "MASTER_PORT", "65535"), {"MASTER_PORT='65535', allowed: 1 to 65533"});
  expect_refusal("auto", with(kSlurm, "SLURM_JOB_NODELIST", "gpu[7"), {"SLURM_JOB_NODELIST='gpu[7'"});
}

TEST(Schedulers, SeveralLaunchersOnANodeAreRefused) {
  expect_refusal("auto", with(kSlurm, "SLURM_NTASKS", "24"), {"SLURM_NTASKS=24", "--ntasks-per-node=1"});
  expect_refusal("auto", with(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "8"),
                 {"OMPI_COMM_WORLD_LOCAL_SIZE=8", "ppr:1:node"});
}

// The numbers of ranks may be ranks or nodes.
TEST(Schedulers, RanksOrNodes) {
  expect_place(find("auto", kNodes), "nodes", 1, 4, "10.0.0.1", 8361);
  EXPECT_TRUE(find("auto", without(kTorchrun, "TORCHELASTIC_RUN_ID")).is_rank);
  for (const char* name : {"LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"}) {
    expect_refusal("auto", with(kNodes, name, "8"), {"RANK=1", "WORLD_SIZE=4", name, "ranks", "nodes"});
  }
  expect_refusal("nodes", kTorchrun, {"LOCAL_RANK", "--scheduler torchrun"});
}

TEST(Schedulers, SeveralThatAgreeAreOne) {
  const Variables pytorch_job = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  expect_place(find("auto", both(kJob, pytorch_job)), "indexed-job", 1, 2, "ep-0.ep", 29400);
  // srun --mpi=pmi2: of the others only the counts are asked, not how they would find the first node.
  const Variables pmi2 = both(kSlurm, {{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}});
  expect_place(find("auto", pmi2), "slurm", 2, 3, "gpu07", 0);
  expect_place(find("auto", with(pmi2, "MASTER_ADDR", "x")), "slurm", 2, 3, "x", 0);
  EXPECT_TRUE(find("auto", both(kSlurm, kTorchrun)).is_rank);  // torchrun under srun
}

TEST(Schedulers, SeveralThatDisagreeAreRefusedAndNamed) {
  expect_refusal("auto", both(kJob, {{"RANK", "0"}, {"WORLD_SIZE", "2"}}),
                 {"indexed-job (", "JOB_COMPLETION_INDEX=1", "nodes (", "RANK=0", "say different things"});
  expect_refusal("auto", both(kSlurm, kOpenMpi), {"slurm (", "SLURM_NODEID=2", "mpi (", "OMPI_COMM_WORLD_RANK=1"});
  expect_refusal("auto", both(kSlurm, without(kTorchrun, "TORCHELASTIC_RUN_ID")), {"slurm (", "torchrun ("});
  expect_place(find("mpi", both(kSlurm, kOpenMpi)), "mpi", 1, 2, "node0", 0);  // once it is named
}

}  // namespace
}  // namespace deep_ep::tools

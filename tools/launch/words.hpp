// The contents of what launchers tell each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace deep_ep::tools {

inline std::int64_t milliseconds_since_1970() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

/// A node's launcher about itself.
struct Hello {
  std::string version;  ///< with the commit it was built from
  int node = 0;         ///< as the scheduler says
  int nodes = 0;        ///< 0: started by ssh, and told nothing
  int ranks = 0;
  std::string host;
  std::string topology;
  std::int64_t clock_ms = milliseconds_since_1970();  ///< when it said this
};
inline void to_json(nlohmann::json& json, const Hello& hello) {
  json = {{"version", hello.version}, {"node", hello.node},         {"nodes", hello.nodes},      {"ranks", hello.ranks},
          {"host", hello.host},       {"topology", hello.topology}, {"clock_ms", hello.clock_ms}};
}
/// Of an older launcher without a clock, too, so that it is told which version it is.
inline void from_json(const nlohmann::json& json, Hello& hello) {
  json.at("version").get_to(hello.version);
  json.at("node").get_to(hello.node);
  json.at("nodes").get_to(hello.nodes);
  json.at("ranks").get_to(hello.ranks);
  json.at("host").get_to(hello.host);
  json.at("topology").get_to(hello.topology);
  hello.clock_ms = json.value("clock_ms", milliseconds_since_1970());
}

/// To a node: the ranks it shall start.
struct Assignment {
  int node = 0;
  int nodes = 1;
  int first_rank = 0;
  int ranks = 0;
  int world_size = 0;
  std::string master;
  int port = 0;
  std::string token;  ///< of the job
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Assignment, node, nodes, first_rank, ranks, world_size, master, port, token)

/// From a node: what ended badly. Rank -1: all of the node, for a reason in words.
struct Failure {
  int status = 1;
  int rank = -1;
  std::string text;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Failure, status, rank, text)

/// To a node: how the run has ended.
struct Verdict {
  int status = 0;
  std::string text;
  bool at_once = false;  ///< nobody wants to wait for ranks that end in their own time
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Verdict, status, text, at_once)

template <class T>
std::string to_words(const T& value) {
  return nlohmann::json(value).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Throws nlohmann::json::exception where it is not a T. No T has numbers with a fraction, which might be no int.
template <class T>
T from_words(std::string_view text) {
  const nlohmann::json value = nlohmann::json::parse(text);
  for (const nlohmann::json& one : value) {
    if (one.is_number_float()) throw nlohmann::json::type_error::create(302, "a number is not whole", &value);
  }
  return value.get<T>();
}

}  // namespace deep_ep::tools

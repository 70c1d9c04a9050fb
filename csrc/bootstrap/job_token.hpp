// Which job a rank belongs to.
#pragma once

#include <string_view>

#include "csrc/support/environment.hpp"
#include "csrc/support/token.hpp"

namespace deep_ep {

/// Ranks that meet over TCP show it to each other, so that a rank of another job that calls on a port of this one is no
/// rank of this group. It comes from what all ranks of a job know already: the text of DEEP_EP_JOB_TOKEN (`deep_ep
/// launch` gives ranks of one host 128 random bits there), else `job`, by which the caller's launcher tells jobs apart.
/// Without either, all jobs have the same token.
inline Token job_token(std::string_view job = {}, const environment::Source& source = environment::of_process) {
  const environment::Value agreed = environment::Reader(source).value("DEEP_EP_JOB_TOKEN");
  return token_of(agreed.text.empty() ? job : agreed.text);
}

}  // namespace deep_ep

// How a call ends that ranks mean in different ways.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tests/cluster/cluster.hpp"
#include "tests/cluster/exchange.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {

/// The call, or the check behind it, ends in a RankMismatch with these words.
inline void require_mismatch(Buffer& buffer, const std::vector<std::string>& words, const std::function<void()>& call) {
  require_throws<RankMismatch>(
      [&] {
        call();
        buffer.check();  // without a host wait, the call itself cannot know
      },
      words, "a call that ranks mean differently");
}

/// Whether a rank may still wait, until its deadline, for one that has found out and ended the call.
enum class WhoFindsOut { everybody, somebody };

/// On every rank: none gets a result, at least one says `words` in a RankMismatch, and who does not has heard of it
/// from one that does.
inline void require_disagreement(Rank& rank, const std::vector<std::string>& words, WhoFindsOut who,
                                 const std::function<void()>& call) {
  std::string wrong;
  char named = 0;
  try {
    call();
    wrong = "nothing was thrown";
  } catch (const RankMismatch& error) {
    const std::string text = error.what();
    if (text.find("has ended the call, and its own error says why") == std::string::npos) {
      named = 1;
      for (const std::string& word : words) {
        if (text.find(word) == std::string::npos) wrong = "'" + word + "' not in: " + text;
      }
    }
  } catch (const TimeoutError& error) {
    if (who == WhoFindsOut::everybody) wrong = error.what();
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  // Everybody comes here before anybody gives up, so that failures are reported as they are.
  const std::vector<std::byte> all = rank.bootstrap()->all_gather(std::as_bytes(std::span(&named, 1)));
  require(wrong.empty(), wrong);
  require(std::ranges::count(all, std::byte{1}) > 0, "no rank found the mismatch");
}

/// Rank 1 has an expert in its topk_idx that does not exist: its dispatch fails with that, and those of the others at
/// once with what the rank has told them. Nobody has missed a call.
inline void require_refusal_of_unknown_expert(Rank& rank, Buffer& buffer, const Case& one, std::int64_t worst) {
  Case bad = one;
  const int experts = one.shape.experts();
  bad.selections[1].idx[static_cast<std::size_t>(2 * one.shape.topk)] = experts + 4;
  Inputs inputs = upload_inputs(rank, bad);
  const DispatchLayout layout = buffer.get_dispatch_layout(inputs.topk_idx, experts, rank.call());
  if (rank.rank() == 1 && worst == 0) rank.executor()->synchronize(rank.stream());  // the host could see the note now
  inputs.dispatch.use(layout);
  inputs.dispatch.num_worst_tokens = worst;
  const auto call = [&] {
    buffer.dispatch(inputs.dispatch, rank.call());
    buffer.check();  // without a host wait, the call itself cannot know
  };
  const std::string expert = "names expert " + std::to_string(experts + 4) + ", allowed: 0 to ";
  if (rank.rank() == 1) {
    require_throws<InvalidArgument>(call, {"topk_idx of token 2 " + expert}, "dispatch with an unknown expert");
  } else {
    require_throws<RankMismatch>(
        call, {"dispatch: rank 1 has ended the call before any row moved, as its topk_idx of token 2 " + expert},
        "dispatch beside a rank with an unknown expert");
  }
  buffer.check();  // nothing is left of it
}

/// The same in a low-latency dispatch, by which the buffer breaks.
inline void require_refusal_of_unknown_expert(Rank& rank, Buffer& buffer, const LowLatencyCase& one, bool hook) {
  LowLatencyCase bad = one;
  const int experts = one.shape.experts();
  bad.inputs[1].selection.idx[static_cast<std::size_t>(2 * one.shape.topk)] = experts;
  const auto call = [&] {
    received(buffer.low_latency_dispatch(with_hook(upload_arguments(rank, bad), hook), rank.call()));
    buffer.check();
  };
  if (rank.rank() == 1) {
    require_throws<InvalidArgument>(
        call, {"low_latency_dispatch: topk_idx of token 2 names expert " + std::to_string(experts)}, "dispatch");
  } else {
    require_throws<RankMismatch>(call, {"rank 1 has ended the call", "an expert beyond the last one"}, "dispatch");
  }
  rank.bootstrap()->barrier();
}

}  // namespace deep_ep::test

#include "csrc/rdma/ring/syndrome.hpp"

namespace deep_ep::rdma {

std::string_view text(Syndrome syndrome) {
  switch (syndrome) {
    case Syndrome::none:
      return "success";
    case Syndrome::local_length:
      return "local length error: the message is longer than the queue pair allows";
    case Syndrome::local_queue_pair:
      return "local queue pair operation error: the device does not accept the work-queue entry";
    case Syndrome::local_protection:
      return "local protection error: the local key is wrong, or the bytes lie outside the registered memory";
    case Syndrome::flushed:
      return "flushed: the queue pair had failed before; an earlier operation has the cause";
    case Syndrome::memory_window_bind:
      return "memory window bind error";
    case Syndrome::bad_response:
      return "bad response: the peer answered with an unexpected packet";
    case Syndrome::local_access:
      return "local access error: the registered memory does not permit this";
    case Syndrome::remote_invalid_request:
      return "remote invalid request: the peer's queue pair does not permit the operation (remote write or atomics not "
             "enabled), or the address of an atomic is not a multiple of 8";
    case Syndrome::remote_access:
      return "remote access error: the remote key is wrong, or the bytes lie outside the memory that the peer "
             "registered";
    case Syndrome::remote_operation:
      return "remote operation error: the peer's device could not finish the request";
    case Syndrome::transport_retries_exceeded:
      return "transport retries exceeded: the peer does not answer (process gone, link down, wrong GID or route)";
    case Syndrome::receiver_not_ready_retries_exceeded:
      return "receiver-not-ready retries exceeded: the peer has no receive posted";
    case Syndrome::remote_aborted:
      return "remote aborted: the peer's device gave up the request";
  }
  return "unknown syndrome";
}

}  // namespace deep_ep::rdma

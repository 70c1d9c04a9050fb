/* Dispatch, experts and combine from C, in normal mode and in a low-latency call, by four processes on the CPU. On GPUs
 * an engine gives a device and its stream. Ranks find each other by an all-gather of the program, such as
 * MPI_Allgather; here it is one of processes that share a piece of memory. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deep_ep/deep_ep.h"

enum { kRanks = 4, kExperts = 8, kTokens = 6, kHidden = 128, kTopk = 2 };

static void must(deep_ep_status status, const char* what) {
  if (status != DEEP_EP_OK) {
    fprintf(stderr, "%s: %s (status %d)\n", what, deep_ep_last_error(), (int)status);
    exit(1);
  }
}

static deep_ep_tensor matrix(void* data, deep_ep_dtype dtype, int64_t rows, int64_t columns) {
  deep_ep_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.dims = 2;
  tensor.shape[0] = rows;
  tensor.shape[1] = columns;
  return tensor;
}

/* What the processes share. */
struct meeting {
  pthread_barrier_t all;
  char bytes[kRanks][1 << 14];
};

struct place {
  struct meeting* meeting;
  int rank;
};

static int all_gather(void* context, const void* mine, size_t bytes, void* all) {
  const struct place* place = context;
  struct meeting* meeting = place->meeting;
  int rank;
  if (bytes > sizeof(meeting->bytes[0])) return 1;
  memcpy(meeting->bytes[place->rank], mine, bytes);
  pthread_barrier_wait(&meeting->all);
  for (rank = 0; rank < kRanks; ++rank) memcpy((char*)all + (size_t)rank * bytes, meeting->bytes[rank], bytes);
  pthread_barrier_wait(&meeting->all); /* all have read */
  return 0;
}

/* Small whole numbers are exact in bfloat16, which is the upper half of a float. */
static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)(bits >> 16);
}
static float to_float(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

/* Every row of `rows` must be `factor` times the token's. */
static int wrong(const char* what, int rank, const uint16_t* rows, const uint16_t* x, float factor) {
  int i;
  for (i = 0; i < kTokens * kHidden; ++i) {
    if (to_float(rows[i]) != factor * to_float(x[i])) {
      fprintf(stderr, "%s, rank %d, element %d: %g, expected %g\n", what, rank, i, (double)to_float(rows[i]),
              (double)(factor * to_float(x[i])));
      return 1;
    }
  }
  return 0;
}

static int run_rank(struct place place) {
  const int rank = place.rank;
  static uint16_t x[kTokens * kHidden], out[kTokens * kHidden];
  int64_t topk_idx[kTokens * kTopk];
  float weights[kTokens * kTopk];
  deep_ep_options options;
  deep_ep_dispatch_arguments arguments;
  deep_ep_low_latency_arguments low_latency;
  deep_ep_buffer* buffer;
  deep_ep_result *dispatched, *combined;
  deep_ep_tensor recv_x, combined_x, rows, idx, factors, sums;
  int i, t, failures = 0, received = 0;

  for (t = 0; t < kTokens; ++t) {
    for (i = 0; i < kHidden; ++i) x[t * kHidden + i] = to_bf16((float)(1 + rank * kTokens + t));
    topk_idx[t * kTopk] = (rank + t) % kExperts; /* experts 2 q and 2 q + 1 are rank q's: these two have two ranks */
    topk_idx[t * kTopk + 1] = (rank + t + 3) % kExperts;
    weights[t * kTopk] = 0.5F;
    weights[t * kTopk + 1] = 1.5F;
  }
  memset(&options, 0, sizeof(options));
  options.size = sizeof(options);
  options.rank = rank;
  options.num_ranks = kRanks;
  options.all_gather = all_gather;
  options.context = &place;
  options.on_cpu = 1;
  options.heap_bytes = deep_ep_heap_bytes(kRanks, kTokens, kHidden * 2, kTopk);
  options.low_latency_bytes = deep_ep_low_latency_bytes(kTokens, kHidden, kRanks, kExperts);
  must(deep_ep_create(&options, &buffer), "create");

  memset(&arguments, 0, sizeof(arguments));
  arguments.size = sizeof(arguments);
  arguments.x = matrix(x, DEEP_EP_BFLOAT16, kTokens, kHidden);
  arguments.topk_idx = matrix(topk_idx, DEEP_EP_INT64, kTokens, kTopk);
  arguments.num_experts = kExperts;
  must(deep_ep_dispatch(buffer, &arguments, NULL, &dispatched), "dispatch");
  recv_x = deep_ep_result_tensor(dispatched, DEEP_EP_RECV_X);
  for (i = 0; i < kExperts / kRanks; ++i) received += deep_ep_rows_per_expert(dispatched)[i];
  /* Experts that give back what they got: each token comes back from its two ranks. */
  must(deep_ep_combine(buffer, dispatched, &recv_x, NULL, NULL, &combined), "combine");
  must(deep_ep_synchronize(buffer), "synchronize");
  combined_x = deep_ep_result_tensor(combined, DEEP_EP_COMBINED_X);
  failures += wrong("combine", rank, combined_x.data, x, 2.0F);
  deep_ep_release(combined);
  deep_ep_release(dispatched);

  memset(&low_latency, 0, sizeof(low_latency));
  low_latency.size = sizeof(low_latency);
  low_latency.x = arguments.x;
  low_latency.topk_idx = arguments.topk_idx;
  low_latency.max_tokens = kTokens;
  low_latency.num_experts = kExperts;
  must(deep_ep_low_latency_dispatch(buffer, &low_latency, NULL, &dispatched), "low-latency dispatch");
  rows = deep_ep_result_tensor(dispatched, DEEP_EP_RECV_X);
  idx = arguments.topk_idx;
  factors = matrix(weights, DEEP_EP_FLOAT32, kTokens, kTopk);
  sums = matrix(out, DEEP_EP_BFLOAT16, kTokens, kHidden);
  must(deep_ep_low_latency_combine(buffer, dispatched, &rows, &idx, &factors, &sums, NULL), "low-latency combine");
  must(deep_ep_synchronize(buffer), "synchronize");
  failures += wrong("low-latency combine", rank, out, x, 2.0F);
  deep_ep_release(dispatched);

  /* An error is a status and a text. */
  low_latency.max_tokens = 0;
  if (deep_ep_low_latency_dispatch(buffer, &low_latency, NULL, &dispatched) != DEEP_EP_INVALID_ARGUMENT ||
      dispatched != NULL || strstr(deep_ep_last_error(), "max_tokens") == NULL) {
    fprintf(stderr, "rank %d: max_tokens of 0 was not refused: %s\n", rank, deep_ep_last_error());
    ++failures;
  }
  must(deep_ep_destroy(buffer), "destroy");
  printf("rank %d: %d rows received, %s\n", rank, received, failures == 0 ? "sums are right" : "WRONG");
  return failures;
}

int main(void) {
  pid_t children[kRanks];
  pthread_barrierattr_t shared;
  struct meeting* meeting = mmap(NULL, sizeof(*meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int rank, failures = 0;
  if (meeting == MAP_FAILED || pthread_barrierattr_init(&shared) != 0 ||
      pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED) != 0 ||
      pthread_barrier_init(&meeting->all, &shared, kRanks) != 0) {
    perror("shared memory");
    return 1;
  }
  for (rank = 0; rank < kRanks; ++rank) {
    children[rank] = fork();
    if (children[rank] == 0) {
      const struct place place = {meeting, rank};
      alarm(60); /* a rank that failed leaves the others in the barrier */
      exit(run_rank(place) != 0);
    }
  }
  for (rank = 0; rank < kRanks; ++rank) {
    int status = 0;
    if (children[rank] < 0 || waitpid(children[rank], &status, 0) < 0 || status != 0) ++failures;
  }
  return failures != 0;
}

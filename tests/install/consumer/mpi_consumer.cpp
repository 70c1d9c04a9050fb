// A program over MPI, with nothing but deep_ep::mpi: MPI's headers come with it.
#include <mpi.h>

#include <cstdio>

#include "deep_ep/bootstrap.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const MPI_Comm self = MPI_COMM_SELF;
  const auto bootstrap = deep_ep::make_mpi_bootstrap(&self);
  std::printf("rank %d of %d\n", bootstrap->rank(), bootstrap->size());
  const bool right = bootstrap->rank() == 0 && bootstrap->size() == 1;
  MPI_Finalize();
  return right ? 0 : 1;
}

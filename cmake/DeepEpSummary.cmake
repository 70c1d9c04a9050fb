# One screen that says what will be built.
if(PROJECT_IS_TOP_LEVEL)
  if(DEEP_EP_CUDA)
    set(cuda "nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_ARCHITECTURES}")
  else()
    set(cuda "off")
  endif()
  message(STATUS "deep_ep ${PROJECT_VERSION}: CUDA ${cuda}; MPI ${DEEP_EP_MPI}; NCCL ${DEEP_EP_NCCL}; "
                 "sanitizer '${DEEP_EP_SANITIZER}'; tests ${DEEP_EP_BUILD_TESTS}")
endif()

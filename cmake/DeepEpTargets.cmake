# Functions that the CMakeLists of the folders use, so that each stays a few lines.

# Flags of the project's own code: warnings, sanitizers, "what was found" definitions, and includes from the root
# ("kernels/...", "csrc/..."), which users never see.
function(deep_ep_configure target)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/include"
                                               "${PROJECT_BINARY_DIR}/include")
  target_compile_options(
    ${target}
    PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall>
            $<$<COMPILE_LANGUAGE:CXX>:-Wextra>
            # Kernel sources say "#pragma unroll", which only nvcc knows.
            $<$<COMPILE_LANGUAGE:CXX>:-Wno-unknown-pragmas>
            $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${DEEP_EP_WERROR}>>:-Werror>
            ${DEEP_EP_SANITIZER_FLAGS}
            # Vectors that are not aligned are an error on GPUs only, so kernels keep the check.
            $<$<NOT:$<STREQUAL:$<TARGET_PROPERTY:TYPE>,OBJECT_LIBRARY>>:${DEEP_EP_HOST_CODE_FLAGS}>)
  target_link_options(${target} PRIVATE ${DEEP_EP_SANITIZER_FLAGS})
  target_compile_definitions(
    ${target} PRIVATE DEEP_EP_HAVE_CUDA=$<BOOL:${DEEP_EP_CUDA}> DEEP_EP_HAVE_MPI=$<BOOL:${DEEP_EP_MPI}>
                      DEEP_EP_HAVE_NCCL=$<BOOL:${DEEP_EP_NCCL}>)
endfunction()

# A program of the project: the library with its internals, and the bootstraps that were built.
function(deep_ep_configure_program target)
  deep_ep_configure(${target})
  target_compile_options(${target} PRIVATE ${DEEP_EP_PROGRAM_FLAGS})
  target_link_libraries(${target} PRIVATE deep_ep ${DEEP_EP_LIBRARIES})
  foreach(bootstrap deep_ep_mpi deep_ep_nccl)
    if(TARGET ${bootstrap})
      target_link_libraries(${target} PRIVATE ${bootstrap})
    endif()
  endforeach()
endfunction()

# The quick tier of the tests needs these targets of this build (the target deep_ep_quick).
function(deep_ep_build_for_quick_tests)
  set_property(GLOBAL APPEND PROPERTY DEEP_EP_QUICK_TARGETS ${ARGN})
endfunction()

# An object library of kernel sources (*.cu) as ordinary C++. The language is a property of a source file within a
# directory, so the same files can be CUDA in another one.
function(deep_ep_add_host_kernels target)
  set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX)
  add_library(${target} OBJECT ${ARGN})
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)  # each is long, and two compile at once
  deep_ep_configure(${target})
endfunction()

# The same sources as CUDA. What ptxas says of every kernel is kept next to the object for the spill check.
function(deep_ep_add_cuda_kernels target)
  set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CUDA)
  add_library(${target} OBJECT ${ARGN})
  deep_ep_configure(${target})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v;-Xcompiler=-Wall>)
  if(NOT DEEP_EP_SELF_CONTAINED) # for profilers; other machines have no use for the paths of this one
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>)
  endif()
  set(launcher "${PROJECT_SOURCE_DIR}/cmake/keep_ptxas_report" ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
endfunction()

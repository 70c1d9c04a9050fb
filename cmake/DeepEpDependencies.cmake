# What the project needs from elsewhere. Everything comes from the distribution (scripts/setup); nothing is downloaded.
#
# DEEP_EP_LIBRARIES collects what the library links; DEEP_EP_PACKAGES what a static consumer has to find again.

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
set(DEEP_EP_LIBRARIES Threads::Threads ${CMAKE_DL_LIBS})
set(DEEP_EP_PACKAGES Threads)

# A package with a compiled library if the distribution has one, otherwise only its headers.
function(deep_ep_find_or_headers package target header definitions)
  find_package(${package} CONFIG QUIET)
  if(TARGET ${target})
    set(library ${target})
    list(APPEND DEEP_EP_PACKAGES ${package})
  else()
    find_path(DEEP_EP_${package}_INCLUDE_DIR ${header} REQUIRED)
    add_library(deep_ep_${package}_headers INTERFACE)
    target_include_directories(deep_ep_${package}_headers SYSTEM INTERFACE "${DEEP_EP_${package}_INCLUDE_DIR}")
    target_compile_definitions(deep_ep_${package}_headers INTERFACE ${definitions})
    set(library $<BUILD_INTERFACE:deep_ep_${package}_headers>)
  endif()
  list(APPEND DEEP_EP_LIBRARIES ${library})
  set(DEEP_EP_LIBRARIES "${DEEP_EP_LIBRARIES}" PARENT_SCOPE)
  set(DEEP_EP_PACKAGES "${DEEP_EP_PACKAGES}" PARENT_SCOPE)
endfunction()

deep_ep_find_or_headers(fmt fmt::fmt fmt/format.h FMT_HEADER_ONLY)

# libgcc_s stays shared: it is part of every system, and its static form needs a newer glibc than all the rest. So does
# std::random_device, which the static C++ library drags in by a class that nobody uses: unused sections go.
set(boost_context_names boost_context)
if(DEEP_EP_SELF_CONTAINED AND BUILD_SHARED_LIBS)
  message(FATAL_ERROR "DEEP_EP_SELF_CONTAINED needs BUILD_SHARED_LIBS=OFF: each library would have a C++ library of its own")
endif()
if(DEEP_EP_SELF_CONTAINED)
  add_link_options(-static-libstdc++ LINKER:--gc-sections)
  set(Boost_USE_STATIC_LIBS ON)
  set(boost_context_names libboost_context.a)
endif()

# Fibers of the host executor. If Boost was not installed as a package, its headers and one library file are enough.
find_package(boost_context CONFIG QUIET)
if(TARGET Boost::context)
  list(APPEND DEEP_EP_LIBRARIES Boost::context)
  list(APPEND DEEP_EP_PACKAGES boost_context)
else()
  find_path(DEEP_EP_BOOST_INCLUDE_DIR boost/context/detail/fcontext.hpp REQUIRED)
  find_library(DEEP_EP_BOOST_CONTEXT_LIBRARY NAMES ${boost_context_names} REQUIRED)
  add_library(deep_ep_boost_context INTERFACE)
  target_include_directories(deep_ep_boost_context SYSTEM INTERFACE "${DEEP_EP_BOOST_INCLUDE_DIR}")
  target_link_libraries(deep_ep_boost_context INTERFACE "${DEEP_EP_BOOST_CONTEXT_LIBRARY}")
  list(APPEND DEEP_EP_LIBRARIES $<BUILD_INTERFACE:deep_ep_boost_context>)
endif()

# Headers of rdma-core only: its libraries are opened when RDMA is needed, and nothing links with them.
find_path(DEEP_EP_VERBS_INCLUDE_DIR infiniband/mlx5dv.h REQUIRED)
mark_as_advanced(DEEP_EP_VERBS_INCLUDE_DIR)
add_library(deep_ep_verbs_headers INTERFACE)
target_include_directories(deep_ep_verbs_headers SYSTEM INTERFACE "${DEEP_EP_VERBS_INCLUDE_DIR}")
list(APPEND DEEP_EP_LIBRARIES $<BUILD_INTERFACE:deep_ep_verbs_headers>)

if(DEEP_EP_CUDA)
  list(APPEND DEEP_EP_LIBRARIES CUDA::cudart_static)
  list(APPEND DEEP_EP_PACKAGES CUDAToolkit)
endif()

# Bootstraps that need another library: on when it is found, an error when asked for and not found.
find_package(MPI QUIET COMPONENTS CXX)
option(DEEP_EP_MPI "Build the MPI bootstrap (default: when MPI is found)" ${MPI_CXX_FOUND})
if(DEEP_EP_MPI AND NOT MPI_CXX_FOUND)
  message(FATAL_ERROR "DEEP_EP_MPI is ON, but no MPI was found (mpicxx on the PATH, or MPI_HOME)")
endif()

if(DEEP_EP_CUDA)
  find_package(NCCL QUIET)
else()
  set(NCCL_FOUND FALSE)
endif()
option(DEEP_EP_NCCL "Build the NCCL bootstrap (default: with CUDA, when NCCL is found)" ${NCCL_FOUND})
if(DEEP_EP_NCCL AND NOT DEEP_EP_CUDA)
  message(FATAL_ERROR "DEEP_EP_NCCL is ON, but NCCL needs DEEP_EP_CUDA=ON")
elseif(DEEP_EP_NCCL AND NOT NCCL_FOUND)
  message(FATAL_ERROR "DEEP_EP_NCCL is ON, but no NCCL was found (nccl.h and libnccl; NCCL_ROOT says where)")
endif()

if(DEEP_EP_BUILD_TOOL OR DEEP_EP_BUILD_TESTS)
  # Headers only; no package file is needed.
  find_path(DEEP_EP_CLI11_INCLUDE_DIR CLI/CLI.hpp REQUIRED)
  find_path(DEEP_EP_JSON_INCLUDE_DIR nlohmann/json.hpp REQUIRED)
  mark_as_advanced(DEEP_EP_CLI11_INCLUDE_DIR DEEP_EP_JSON_INCLUDE_DIR)
  add_library(deep_ep_cli_headers INTERFACE)
  target_include_directories(deep_ep_cli_headers SYSTEM INTERFACE "${DEEP_EP_CLI11_INCLUDE_DIR}" "${DEEP_EP_JSON_INCLUDE_DIR}")
endif()
if(DEEP_EP_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()

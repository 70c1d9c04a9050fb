# Settings that every target of the project shares.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
  endif()
  # One folder for the programs and one for the libraries, so that a path can be guessed.
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
  set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
  set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")

  find_program(DEEP_EP_CCACHE ccache)
  mark_as_advanced(DEEP_EP_CCACHE)
  if(DEEP_EP_CCACHE)
    foreach(language CXX CUDA)
      if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER "${DEEP_EP_CCACHE}")
      endif()
    endforeach()
  endif()
endif()

# The installed program finds the library next to it, wherever the prefix is moved.
set(CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
# NCCL and MPI may lie outside the system's folders.
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH TRUE)

if(DEEP_EP_SANITIZER STREQUAL "address")
  # Of UndefinedBehaviorSanitizer what is cheap to compile: arithmetic, shifts, bounds of arrays, values of bool and enum.
  # Its checks of every pointer nearly double the time of a unit, and AddressSanitizer sees most of what they see.
  set(DEEP_EP_SANITIZER_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
      -fno-sanitize=null,object-size,vptr,pointer-overflow,nonnull-attribute,returns-nonnull-attribute)
  set(DEEP_EP_HOST_CODE_FLAGS -fno-sanitize=alignment)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # The same checks as calls, not inline: a third less to compile, for programs, which are no hot code.
    set(DEEP_EP_PROGRAM_FLAGS --param=asan-instrumentation-with-call-threshold=0)
  endif()
elseif(DEEP_EP_SANITIZER STREQUAL "thread")
  # -Wno-tsan: GCC warns that fences are not modelled; the host executor announces what they order itself.
  set(DEEP_EP_SANITIZER_FLAGS -fsanitize=thread -fno-omit-frame-pointer)
elseif(NOT DEEP_EP_SANITIZER STREQUAL "")
  message(FATAL_ERROR "DEEP_EP_SANITIZER is '${DEEP_EP_SANITIZER}'; allowed: empty, 'address', 'thread'")
endif()
# Code of tests is compiled for longer than it runs; with AddressSanitizer -Og takes a third less than -O1.
set(DEEP_EP_QUICK_FLAGS $<$<CONFIG:RelWithDebInfo>:$<IF:$<STREQUAL:${DEEP_EP_SANITIZER},address>,-Og,-O1>>)
if(DEEP_EP_SANITIZER)
  # In builds for tests so are all programs.
  list(APPEND DEEP_EP_PROGRAM_FLAGS ${DEEP_EP_QUICK_FLAGS})
endif()
if(DEEP_EP_SANITIZER AND DEEP_EP_CUDA)
  message(FATAL_ERROR "DEEP_EP_SANITIZER is for CPU builds; on GPUs use compute-sanitizer (scripts/measure_node OUT sanitize)")
endif()

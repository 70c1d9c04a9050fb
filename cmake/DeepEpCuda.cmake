# The CUDA language, for which machine code is made, and where the runtime is.
include(DeepEpCudaArchitectures)

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(choose_architectures ON)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)  # what every nvcc here knows, to try the compiler with
endif()
# nvcc must hand host code to the compiler that builds everything else: they share C++ types.
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
# Static, so that an application needs nothing of the toolkit at run time. The driver's own API is opened when it is
# needed (csrc/executor/cuda/driver.cpp): nothing links with libcuda, and one binary also runs where there is no driver.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

enable_language(CUDA)
deep_ep_cuda_architectures(${CMAKE_CUDA_COMPILER_VERSION} architectures)
set(DEEP_EP_CUDA_ARCHITECTURES "" CACHE STRING "Compile for these GPUs alone, in CMake's words (default: all that nvcc knows)")
if(choose_architectures AND DEEP_EP_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${DEEP_EP_CUDA_ARCHITECTURES})
elseif(choose_architectures)
  set(CMAKE_CUDA_ARCHITECTURES ${architectures})
endif()
# CMake 3.25.1 does not know yet that nvcc 12 and later speak C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)
find_package(Python3 REQUIRED COMPONENTS Interpreter)  # cmake/check_spills.py

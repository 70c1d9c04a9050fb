# The CUDA language, for which machine code is made, and where the runtime is.

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(choose_architectures ON)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)  # what every nvcc here knows, to try the compiler with
endif()
# nvcc must hand host code to the compiler that builds everything else: they share C++ types.
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
# Static, so that an application needs nothing of the toolkit at run time. The driver's own API is looked up through
# it (cudaGetDriverEntryPoint): nothing links with libcuda, and one binary also runs where there is no driver.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: 12.4 or later is needed, 13.0 is what is tested")
endif()
if(choose_architectures)
  # Machine code for Hopper and Blackwell data-centre GPUs, and PTX that newer ones compile at load time.
  set(CMAKE_CUDA_ARCHITECTURES 90a-real 100a-real 90-virtual)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION} does not know sm_100a (12.8 does): Blackwell GPUs compile the PTX")
    list(REMOVE_ITEM CMAKE_CUDA_ARCHITECTURES 100a-real)
  endif()
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

# Toolchain file: what scripts/setup --aarch64 brought, on a machine of another architecture.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
get_filename_component(tools "${CMAKE_CURRENT_LIST_DIR}/../build/aarch64" ABSOLUTE)
set(CMAKE_SYSROOT "${tools}/sysroot")
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_FLAGS_INIT "-Xcompiler=--sysroot=${CMAKE_SYSROOT}")  # CMake tells it other compilers only
set(CMAKE_CROSSCOMPILING_EMULATOR "qemu-aarch64-static;-L;${CMAKE_SYSROOT}")
set(CMAKE_FIND_ROOT_PATH "${tools}/cuda" "${tools}/nvidia")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

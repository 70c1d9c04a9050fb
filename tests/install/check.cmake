# Run by ctest: install, move the prefix, build the consumer by find_package and by pkg-config, run both.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status COMMAND_ECHO STDOUT)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${status}): ${command}")
  endif()
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
run(${CMAKE_COMMAND} --install "${BUILD_DIR}" --prefix "${WORK_DIR}/first")
# Nothing in the installed tree may depend on where it was first put.
file(RENAME "${WORK_DIR}/first" "${WORK_DIR}/prefix")

run(${CMAKE_COMMAND} -S "${SOURCE_DIR}" -B "${WORK_DIR}/by_cmake" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}"
    "-DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix")
run(${CMAKE_COMMAND} --build "${WORK_DIR}/by_cmake")
run("${WORK_DIR}/by_cmake/consumer")
if(EXISTS "${WORK_DIR}/by_cmake/mpi_consumer")
  run("${WORK_DIR}/by_cmake/mpi_consumer")
endif()

find_program(pkg_config NAMES pkg-config pkgconf)
if(NOT pkg_config)
  message(FATAL_ERROR "pkg-config is not installed (scripts/setup installs it)")
endif()
set(ENV{PKG_CONFIG_PATH} "${WORK_DIR}/prefix/${LIBDIR}/pkgconfig")
# The module's flags are all that a program needs to be built and to run.
function(build_by_pkg_config module source)
  execute_process(COMMAND "${pkg_config}" --cflags --libs --static ${module} OUTPUT_VARIABLE flags
                  COMMAND_ERROR_IS_FATAL ANY OUTPUT_STRIP_TRAILING_WHITESPACE)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run("${CXX}" -std=c++20 "${SOURCE_DIR}/${source}" -o "${WORK_DIR}/by_${module}" ${flags})
  run("${WORK_DIR}/by_${module}")
endfunction()
build_by_pkg_config(deep_ep consumer.cpp)
if(EXISTS "${WORK_DIR}/prefix/${LIBDIR}/pkgconfig/deep_ep-mpi.pc")
  build_by_pkg_config(deep_ep-mpi mpi_consumer.cpp)
endif()

if(EXISTS "${WORK_DIR}/prefix/bin/deep_ep")
  run("${WORK_DIR}/prefix/bin/deep_ep" --help)
endif()

# Headers, libraries, the command, and what find_package(deep_ep) and pkg-config read.
include(CMakePackageConfigHelpers)

set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/deep_ep")
set(installed_targets deep_ep)
foreach(target deep_ep_mpi deep_ep_nccl deep_ep_tool)
  if(TARGET ${target})
    list(APPEND installed_targets ${target})
  endif()
endforeach()

install(
  TARGETS ${installed_targets}
  EXPORT deep_ep-targets
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}"
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/deep_ep" "${PROJECT_BINARY_DIR}/include/deep_ep"
        DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
if(DEEP_EP_BUILD_TOOL)
  # It also uninstalls, so an installed tree carries its own.
  install(PROGRAMS "${PROJECT_SOURCE_DIR}/install.sh" DESTINATION "${CMAKE_INSTALL_DATADIR}/deep_ep")
  # The first hour on new machines, and pictures.
  install(PROGRAMS "${PROJECT_SOURCE_DIR}/scripts/first_hour" "${PROJECT_SOURCE_DIR}/scripts/bench_plot.py"
          DESTINATION "${CMAKE_INSTALL_DATADIR}/deep_ep/scripts")
endif()
install(EXPORT deep_ep-targets NAMESPACE deep_ep:: DESTINATION "${config_dir}")

# A static library leaves its dependencies to whoever links it.
set(DEEP_EP_FIND_DEPENDENCIES "")
set(packages "")
if(NOT BUILD_SHARED_LIBS)
  set(packages ${DEEP_EP_PACKAGES})
endif()
if(TARGET deep_ep_nccl)
  install(FILES "${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake" DESTINATION "${config_dir}")
endif()
foreach(package ${packages})
  string(APPEND DEEP_EP_FIND_DEPENDENCIES "find_dependency(${package})\n")
endforeach()
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/deep_ep-config.cmake.in" "${PROJECT_BINARY_DIR}/deep_ep-config.cmake"
                              INSTALL_DESTINATION "${config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/deep_ep-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/deep_ep-config.cmake" "${PROJECT_BINARY_DIR}/deep_ep-config-version.cmake"
        DESTINATION "${config_dir}")

# pkg-config: the prefix follows the file, so an installed tree can be moved.
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" OUTPUT_VARIABLE
           DEEP_EP_PC_PREFIX)
set(DEEP_EP_PC_PRIVATE "")
if(NOT BUILD_SHARED_LIBS)
  string(APPEND DEEP_EP_PC_PRIVATE "-lstdc++ -lpthread -ldl -lboost_context")
  if(TARGET fmt::fmt)
    string(APPEND DEEP_EP_PC_PRIVATE " -lfmt")
  endif()
  if(DEEP_EP_CUDA)
    string(APPEND DEEP_EP_PC_PRIVATE " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static")
  endif()
endif()
set(DEEP_EP_PC_RPATH "")
if(BUILD_SHARED_LIBS)
  set(DEEP_EP_PC_RPATH " -Wl,-rpath,\${libdir}")
endif()
function(deep_ep_install_pc name template)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/${template}" "${PROJECT_BINARY_DIR}/${name}.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/${name}.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
endfunction()
deep_ep_install_pc(deep_ep deep_ep.pc.in)

# A bootstrap over another library, with what its users need of that: deep_ep-mpi, deep_ep-nccl.
function(deep_ep_install_bootstrap_pc name include_folders libraries)
  set(DEEP_EP_PC_BOOTSTRAP ${name})
  list(TRANSFORM include_folders PREPEND "-I")
  list(JOIN include_folders " " DEEP_EP_PC_CFLAGS)
  list(JOIN libraries " " DEEP_EP_PC_LIBS)
  deep_ep_install_pc(deep_ep-${name} deep_ep-bootstrap.pc.in)
endfunction()
if(TARGET deep_ep_mpi)
  deep_ep_install_bootstrap_pc(mpi "${MPI_CXX_INCLUDE_DIRS}" "${MPI_CXX_LIBRARIES}")
endif()
if(TARGET deep_ep_nccl)
  deep_ep_install_bootstrap_pc(nccl "${NCCL_INCLUDE_DIR}" "${NCCL_LIBRARY}")
endif()

# fmt and Boost.Context have another version in every distribution. With them beside it, an installed tree runs
# wherever the C library is new enough. MPI is the cluster's own, and in /usr packages depend on each other instead.
if(DEEP_EP_BUNDLE)
  set(programs "")
  if(DEEP_EP_BUILD_TOOL)
    set(programs "EXECUTABLES [[$<TARGET_FILE:deep_ep_tool>]]")
  endif()
  install(
    CODE "set(libdir [[${CMAKE_INSTALL_LIBDIR}]])
if(NOT CMAKE_INSTALL_PREFIX MATCHES \"^/usr(/local)?/?$\")
  file(GET_RUNTIME_DEPENDENCIES LIBRARIES [[$<TARGET_FILE:deep_ep>]] ${programs}
    RESOLVED_DEPENDENCIES_VAR found UNRESOLVED_DEPENDENCIES_VAR missing CONFLICTING_DEPENDENCIES_PREFIX several
    PRE_INCLUDE_REGEXES \"^lib(fmt|boost_context)[.-]\" PRE_EXCLUDE_REGEXES \".*\")
  foreach(library IN LISTS found)
    file(INSTALL \"\${library}\" DESTINATION \"\${CMAKE_INSTALL_PREFIX}/\${libdir}\" FOLLOW_SYMLINK_CHAIN)
  endforeach()
endif()")
endif()

# Read by cpack for each generator.
if(CPACK_GENERATOR STREQUAL "DEB")
  set(CPACK_PACKAGING_INSTALL_PREFIX "/usr")
  # Two commits are two versions: apt takes one that has the version of what is installed for the same thing. The file
  # is called as the tarball is, by the version alone.
  set(hash "")
  if(EXISTS "${CPACK_DEEP_EP_BUILD_INFO}")
    file(STRINGS "${CPACK_DEEP_EP_BUILD_INFO}" hash REGEX "DEEP_EP_GIT_HASH \"..*\"")
  endif()
  if(hash MATCHES "\"(.+)\"")
    string(REPLACE "-" "." hash "${CMAKE_MATCH_1}")
    set(CPACK_DEBIAN_PACKAGE_VERSION "${CPACK_PACKAGE_VERSION}+g${hash}")
    execute_process(COMMAND dpkg --print-architecture OUTPUT_VARIABLE architecture COMMAND_ERROR_IS_FATAL ANY
                    OUTPUT_STRIP_TRAILING_WHITESPACE)
    set(CPACK_DEBIAN_FILE_NAME "${CPACK_DEBIAN_PACKAGE_NAME}_${CPACK_PACKAGE_VERSION}_${architecture}.deb")
  endif()
endif()

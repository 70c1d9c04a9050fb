# cpack --config build/PRESET/CPackConfig.cmake: a .tar.gz that runs from any folder (install.sh --from), and a .deb.
set(CPACK_GENERATOR TGZ DEB)
set(CPACK_PACKAGE_NAME deep_ep)
set(CPACK_PACKAGE_VENDOR "deep_ep")
set(CPACK_PACKAGE_CONTACT "the deep_ep maintainers <deep_ep@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGE_FILE_NAME "deep_ep-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR}")
set(CPACK_PACKAGE_CHECKSUM SHA256)
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)

# What the programs link is looked up in the packages that are installed here. rdma-core is opened at run time, and only
# where there is RDMA.
set(CPACK_DEBIAN_PACKAGE_NAME deep-ep)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "libibverbs1, ibverbs-providers")
set(CPACK_DEBIAN_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "The library, its headers, and the command deep_ep: doctor, bench, demo, env and size.")
# The tarball has no folder above bin/ and lib/ but its own; the .deb belongs to the system.
set(CPACK_DEEP_EP_BUILD_INFO "${PROJECT_BINARY_DIR}/tools/build_info/deep_ep_build_info.hpp")
set(CPACK_PROJECT_CONFIG_FILE "${CMAKE_CURRENT_LIST_DIR}/package_config.cmake")
include(CPack)

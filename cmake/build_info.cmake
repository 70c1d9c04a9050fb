# Run by every build of the command: writes OUTPUT, a header with the commit that is built, and touches it only when
# that changed. A source tree without git has none; GIVEN (DEEP_EP_GIT_HASH) names it then.
set(hash "${GIVEN}")
if(hash STREQUAL "" AND GIT AND EXISTS "${SOURCE_DIR}/.git")
  execute_process(COMMAND "${GIT}" -C "${SOURCE_DIR}" describe --always --abbrev=10 --dirty --exclude "*"
                  OUTPUT_VARIABLE hash RESULT_VARIABLE status ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT status EQUAL 0)
    set(hash "")
  endif()
endif()
set(text "// Made by cmake/build_info.cmake.\n#pragma once\n\n#define DEEP_EP_GIT_HASH \"${hash}\"\n")
set(old "")
if(EXISTS "${OUTPUT}")
  file(READ "${OUTPUT}" old)
endif()
if(NOT text STREQUAL old)
  file(WRITE "${OUTPUT}" "${text}")
endif()

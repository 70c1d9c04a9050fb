# `deep_ep env`: what a shell makes of its scripts.
deep_ep_add_tool_test(env_unknown_format STATUS 2 PATTERN "^deep_ep: --format[^\n]*toml[^\n]*\n$"
                      ARGUMENTS env --format toml)
deep_ep_add_tool_test(env_two_forms STATUS 2 PATTERN "^deep_ep: [^\n]*--json excludes --format[^\n]*\n$"
                      ARGUMENTS env --format shell --json)
# Sourced once, twice, and made again from what it set: the environment stays the same. A text keeps its odd characters.
deep_ep_add_shell_test(env_sourced_twice "set -eu; d=$(mktemp -d); export DEEP_EP_LOG_FILE=\"it's \\$x\" NCCL_IB_TC=52
  \"$0\" env --format shell > $d/first; unset DEEP_EP_LOG_FILE NCCL_IB_TC; . $d/first; env > $d/once; . $d/first; env > $d/twice
  diff $d/once $d/twice; test \"$DEEP_EP_LOG_FILE $NCCL_IB_TC\" = \"it's \\$x 52\"
  \"$0\" env --format shell > $d/second; . $d/second; env > $d/thrice; diff $d/once $d/thrice; if grep LD_PRELOAD $d/*; then exit 1; fi; rm -r $d")
# docs/reference/environment.md is this output.
deep_ep_add_shell_test(env_page "\"$0\" env --markdown | diff ${PROJECT_SOURCE_DIR}/docs/reference/environment.md - ||
  { echo 'write it anew: build/host/bin/deep_ep env --markdown > docs/reference/environment.md'; exit 1; }")
# The first line is one word; the commit is that of the sources, where they are in git.
deep_ep_add_shell_test(version_is_whole "\"$0\" --version | head -n 1 | grep -Ex '${PROJECT_VERSION}(-g[0-9a-f]{7,}(-dirty)?)?' &&
  for fact in cuda 'gpu code' transports bootstraps compiler; do \"$0\" --version | grep -q \"^  $fact  *[^ ]\" || exit 1; done")

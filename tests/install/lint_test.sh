#!/usr/bin/env bash
# All shell scripts, by shellcheck and shfmt.
# usage: lint_test.sh SOURCE_DIR
set -euo pipefail
cd "$1"
# grep -q ends at its first match; the program before it may then die of SIGPIPE, which pipefail makes an error.
if git grep -nE '[^|][|] *grep -[A-Za-z]*q' -- scripts '*.sh' .ci; then exit 1; fi
PATH=$PWD/build/format-venv/bin:$PATH
for tool in shellcheck shfmt; do
  command -v $tool >/dev/null || { printf 'lint: Skipped\nscripts/setup --lint installs %s\n' $tool && exit 77; }
done
mapfile -t files < <({ git grep -lE '^#!.*(bash|/sh)( |$)' && git ls-files '*.sh' '*.sbatch'; } | grep -v '\.md$' | sort -u)
shellcheck -x -P SCRIPTDIR "${files[@]}"
shfmt -i 2 -ci -d "${files[@]}"
# What wheels alone hold is in no package.
if grep -n "COMPONENT python" python/bindings/CMakeLists.txt | grep -v EXCLUDE_FROM_ALL; then exit 1; fi
echo "${#files[@]} scripts"

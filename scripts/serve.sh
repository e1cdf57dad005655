#!/usr/bin/env bash
# Runs the shipped deployment for the installed stack: on the GPUs where it is the GPU stack, else on the CPU. Says first
# what would keep it from starting.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

read -r stack _ <.venv/setup.stamp
deployment=deployments/cpu_rollout.yaml
if [[ $stack == gpu ]]; then
  deployment=deployments/fp8_rollout.yaml
  .venv/bin/rollout-service doctor $deployment || {
    echo "serve: not started. On this machine's CPU: STACK=cpu make serve" >&2
    exit 1
  }
elif nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
  echo "serve: on the CPU, since the CPU stack is installed. On the GPUs: make serve, without STACK=cpu" >&2
fi
echo "serve: serve run $deployment"
exec .venv/bin/serve run $deployment

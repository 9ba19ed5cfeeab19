#!/bin/sh
# Makes what compose.yaml reads from deploy/secrets, once: a user's key, Prometheus' key, Grafana's password. What is there is
# kept. The folder is closed to others; its files are not, since in a container their owner has another number.
set -eu
cd "$(dirname "$0")"
mkdir -p secrets
chmod 700 secrets

draw() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

[ -e secrets/metrics-key ] || draw > secrets/metrics-key
[ -e secrets/grafana-admin ] || draw > secrets/grafana-admin
[ -e secrets/api-keys ] || printf '%s\n' "$(draw)" "$(cat secrets/metrics-key):metrics" > secrets/api-keys
chmod 644 secrets/*
echo "The key of a first user: $(head -n 1 secrets/api-keys)"

#!/bin/sh
# Makes what compose.yaml reads from deploy/secrets, once: a user's and an admin's key, of which only the digests are kept,
# Prometheus' key and Grafana's password. What is there stays. The folder is closed to others; its files are not, as in a
# container their reader is somebody else.
set -eu
cd "$(dirname "$0")"
mkdir -p secrets
chmod 700 secrets

draw() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
digest() { printf '%s' "$1" | sha256sum | cut -d ' ' -f 1; }

[ -e secrets/metrics-key ] || draw > secrets/metrics-key
[ -e secrets/grafana-admin ] || draw > secrets/grafana-admin
if [ ! -e secrets/api-keys ]; then
  key=$(draw)
  admin=$(draw)
  {
    echo "user:user:sha256:$(digest "$key")"
    echo "admin:admin:sha256:$(digest "$admin")"
    echo "prometheus:metrics:sha256:$(digest "$(cat secrets/metrics-key)")"
  } > secrets/api-keys
  echo "The user's key, shown this once: $key"
  echo "The admin's, for /status and /admin: $admin"
fi
chmod 644 secrets/*

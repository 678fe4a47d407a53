#!/bin/sh
# Installs JupyterHub's proxy for Node into an environment, where npm is there; `hpdl hub` finds it.
#
#     sh cluster/hub_proxy.sh .venv      exit code 0 also without npm: the proxy in Python does the same

environment=${1:?usage: sh cluster/hub_proxy.sh ENVIRONMENT}
package=configurable-http-proxy@5.3.0
folder=$environment/lib/hpdl-hub # hpdl_lab/classroom/proxy.py looks there

[ "$(cat "$folder/installed" 2>/dev/null)" = "$package" ] && exit 0
if ! command -v npm >/dev/null 2>&1; then
    echo "There is no npm on this machine: hpdl hub takes the proxy in Python, which does the same with less traffic."
    exit 0
fi
mkdir -p "$folder" &&
    npm install --prefix "$folder" --no-fund --no-audit --loglevel=error "$package" &&
    echo "$package" >"$folder/installed"

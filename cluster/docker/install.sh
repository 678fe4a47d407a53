#!/bin/sh
# What goes into every image, Docker's, Binder's and Apptainer's: the one list of commands, in two steps.
#
#     sh cluster/docker/install.sh system      Debian packages; needs nothing of this clone
#     sh cluster/docker/install.sh lab         /opt/venv, as `make hub` does, with JupyterHub's server for one attendee
#
# Both as root. JUPYTERHUB=5.5.0 in the environment takes that version in place of the one in constraints.txt:
# the server of an attendee and the hub that starts it must agree, and a hub in Kubernetes comes with its chart.
# PIP_EXTRA_INDEX_URL may name PyTorch's index of CPU wheels, or the image carries CUDA, 3 GB more.
set -eu

case ${1:-} in
system)
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    # The first row is what cluster/laptop/needs.sh asks for; ip and tc make emulated hosts, ps is for whoever looks.
    apt-get install -y --no-install-recommends \
        make g++ python3 python3-dev python3-venv \
        ca-certificates iproute2 procps
    rm -rf /var/lib/apt/lists/*
    ;;
lab)
    cd "$(dirname "$0")/../.."
    export PIP_NO_CACHE_DIR=1
    make /opt/venv/.installed-hub VENV=/opt/venv
    if [ -n "${JUPYTERHUB:-}" ]; then
        /opt/venv/bin/python -m pip install --no-deps "jupyterhub==$JUPYTERHUB"
    fi
    /opt/venv/bin/python -m compileall -q hpdl_lab # attendees cannot write here, so nobody else would
    rm -rf build
    ;;
*)
    echo "usage: sh $0 system|lab" >&2
    exit 2
    ;;
esac

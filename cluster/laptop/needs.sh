#!/bin/sh
# Names every missing system need, with the command that installs it, before anything is installed or built.
#
#     sh cluster/laptop/needs.sh PYTHON      exit code 1 when something is missing
#
# Needs: Python 3.11 or newer with venv and its header files, and a C++ compiler. The rest comes from pip.

python=${1:-python3}
missing=""  # kinds: venv headers compiler

say() { printf '%s\n' "$*" >&2; }
lacks() { say "Missing: $2."; missing="$missing $1"; }

# -- Python: without it nothing else can be asked --

newer() { # the newest suitable Python on PATH
    for name in python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null 2>&1; then echo "$name"; return; fi
    done
}

if ! command -v "$python" >/dev/null 2>&1; then
    other=$(newer)
    say "Missing: Python, there is no \"$python\" on PATH. ${other:+Here is another: make lab PYTHON=$other}"
    [ -n "$other" ] || say "Install Python 3.11 or newer, or name one: make lab PYTHON=/path/to/python3"
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    other=$(newer)
    say "Missing: Python 3.11 or newer, \"$python\" is $("$python" --version 2>&1)." \
        "Name a newer one: make lab PYTHON=${other:-/path/to/python3.12}"
    exit 1
fi

# -- what distributions split from Python, and the compiler --

"$python" -c 'import ensurepip, venv' 2>/dev/null || lacks venv "the module venv of $python"
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    lacks headers "Python.h, the header files of $python"
found=""
for compiler in "${CXX:-c++}" c++ g++ clang++; do
    # shellcheck disable=SC2086  # CXX may hold flags
    if $compiler --version >/dev/null 2>&1; then found=$compiler; break; fi
done
[ -n "$found" ] || lacks compiler "a C++ compiler"
[ -n "$missing" ] || exit 0

# -- the command that installs them --

packages() { # venv-package headers-package compiler-package -> those that are missing
    for kind in $missing; do
        case $kind in venv) echo "$1" ;; headers) echo "$2" ;; compiler) echo "$3" ;; esac
    done | sed '/^$/d' | tr '\n' ' '
}

[ "$(id -u)" = 0 ] && sudo="" || sudo="sudo "
if command -v apt-get >/dev/null 2>&1; then
    # Debian names the packages of its default Python python3-..., those of another python3.12-...
    case ${python##*/} in python3.*) name=${python##*/} ;; *) name=python3 ;; esac
    command="${sudo}apt-get update && ${sudo}apt-get install -y $(packages "$name-venv" "$name-dev" g++)"
elif command -v dnf >/dev/null 2>&1; then
    command="${sudo}dnf install -y $(packages python3 python3-devel gcc-c++)"
elif command -v zypper >/dev/null 2>&1; then
    command="${sudo}zypper install -y $(packages python3 python3-devel gcc-c++)"
elif command -v pacman >/dev/null 2>&1; then
    command="${sudo}pacman -S --needed $(packages python python gcc)"
elif command -v apk >/dev/null 2>&1; then
    command="${sudo}apk add $(packages python3 python3-dev g++)"
elif [ "$(uname)" = Darwin ]; then
    command="xcode-select --install"
else
    command="the package manager of this system: venv, Python.h and c++ are wanted"
fi
say "Install with: $command"
exit 1

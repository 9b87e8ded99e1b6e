#!/bin/sh
# Runs the tests under each of Python 3.11, 3.12 and 3.13 that works here, each in a .venv of its own.
set -u
cd "$(dirname "$0")/.." || exit 2

find_python() { # prints a working interpreter of version $1: from PATH, else where pyenv keeps them
    for python in "python$1" "/usr/bin/python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$python" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            echo "$python"
            return
        fi
    done
}

result=0
for version in 3.11 3.12 3.13; do
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        echo "matrix: Python $version: not found here, skipped"
        continue
    fi
    venv=.venv-$version
    if [ ! -e "$venv/.develops" ] || [ pyproject.toml -nt "$venv/.develops" ]; then
        rm -rf "$venv"
        { "$python" -m venv "$venv" &&
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[embedded,dev]' &&
            touch "$venv/.develops"; } || exit 1
    fi
    if "$venv/bin/python" -m pytest -q -n 2 -m "not slow"; then
        echo "matrix: Python $version: passed"
    else
        echo "matrix: Python $version: FAILED"
        result=1
    fi
done
exit $result

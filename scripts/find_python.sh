#!/bin/sh
# Prints the path of a Python that can run the project, or on stderr the reason why there is none (exit 1).
#
#   sh scripts/find_python.sh              tries common names on PATH
#   sh scripts/find_python.sh CANDIDATE    tries this one only
#
# Every candidate is run, because version managers put names on PATH that only print an error.
# The range is the one of `requires-python` in pyproject.toml; tests/unit/scripts/test_setup.py compares them.
set -u

probe='
import sys
print("%d.%d" % sys.version_info[:2])
if not (3, 11) <= sys.version_info[:2] < (3, 15):
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(4)
print(sys.executable)
'

[ $# -gt 0 ] || set -- python3 python3.12 python3.11 python3.13 python3.14 python
seen=''
without_venv=''
for candidate in "$@"; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    answer=$("$candidate" -c "$probe" 2>/dev/null)
    case $? in
        0) printf '%s\n' "$answer" | tail -n 1; exit 0 ;;
        3) seen="$seen $candidate is $answer," ;;
        4) without_venv=${without_venv:-$answer} ;;
        *) seen="$seen $candidate does not run," ;;
    esac
done

if [ -n "$without_venv" ]; then
    echo "vitray: Python $without_venv is here, but without its venv module." >&2
    echo "        On Debian and Ubuntu: apt install python$without_venv-venv" >&2
else
    echo "vitray: needs Python 3.11 to 3.14; found:${seen:- none of $*}" | sed 's/,$//' >&2
    echo "        Install one, for example: apt install python3.12 python3.12-venv, or name it: make setup PYTHON=/path/to/python3.12" >&2
fi
exit 1

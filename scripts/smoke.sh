#!/usr/bin/env bash
# Trains, lints and verifies with the lockstep that is installed in an environment, from an empty folder outside the clone.
#
#   bash scripts/smoke.sh .venv/bin           # needs the packages torch-lockstep[lint]; a CPU is enough; about a minute
set -euo pipefail
bin=$(cd "$1" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
# Nothing of the caller's environment may bring another lockstep.
for name in $(compgen -e | grep -E '^(PYTHON|LOCKSTEP|VIRTUAL)' || true); do unset "$name"; done

stop() { echo "smoke: $1" >&2; exit 1; }

places=$("$bin/python" -c 'import lockstep, lockstep_lint, sysconfig; print(lockstep.__file__, lockstep_lint.__file__, sysconfig.get_path("purelib"))')
read -r ours linter site <<<"$places"
[[ $ours == "$site"/* && $linter == "$site"/* ]] || stop "imported from elsewhere: $places"
[[ -f ${ours%/*}/py.typed && -f ${linter%/*}/py.typed ]] || stop "py.typed is missing"

"$bin/python" -c 'for i in range(800): print(f"def f_{i}(x):\n    return x + {i * i}\n")' >code.txt
data=(--dataset-name code.txt --data.vocab-size 300 --data.cache cache --seq-len 32 --batch-size 8 --device cpu)
"$bin/lockstep" train "${data[@]}" --experiment-name one --max-steps 20 --exact
"$bin/lockstep" launch --nproc-per-node 2 -- train "${data[@]}" --experiment-name two --max-steps 20 --exact
prints=$(for run in one two; do "$bin/lockstep" checkpoint inspect "outputs/$run" | grep fingerprint; done | sort -u)
[[ -n $prints && $(wc -l <<<"$prints") == 1 ]] || stop "one process and two trained different models: $prints"
"$bin/lockstep" checkpoint verify outputs/two | grep "step-00000020: whole"
"$bin/lockstep" export outputs/two model.safetensors
"$bin/lockstep" verify "${data[@]}" --engines single,ddp --world-sizes 1,2 --steps 2 --resume-at 0
compgen -G '*.json' && stop "verify left files in the folder that it ran in"

printf 'import torch\n\nwith torch.cuda.amp.autocast():\n    pass\n' >script.py
for command in "lockstep-lint" "lockstep lint"; do
  found=$("$bin"/$command --select LS029 script.py) && stop "$command found nothing in a script with a mistake"
  grep LS029 <<<"$found" || stop "$command did not find LS029: $found"
done
"$bin/lockstep" lint --select LS029 --fix script.py
"$bin/lockstep" lint --select LS029 script.py
"$bin/lockstep" lint --explain LS029 >/dev/null
echo "smoke: trained, linted and verified with $("$bin/lockstep" --version), $("$bin/python" --version)"

#!/usr/bin/env bash
# Builds both distributions, checks and tries them, and prints the command that uploads them. It uploads nothing.
#
#   make release                              # PYTHON=python3.12 chooses another Python
#   bash scripts/release.sh --rehearse        # also of a tree with changes or without a release date, into a temporary folder
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
rehearse=
if [[ ${1:-} == --rehearse ]]; then rehearse=1; elif [[ $# != 0 ]]; then
  echo "release: unknown argument $1; there is --rehearse" >&2
  exit 2
fi

refuse() {
  echo "release: $1" >&2
  [[ $rehearse ]] || exit 2
}

[[ -z $(git status --porcelain) ]] || refuse "the working tree has changes; commit them (git status)"
version=$("$python" - <<'END'
import ast, pathlib, sys, tomllib

versions = {path: tomllib.loads(pathlib.Path(path).read_text())["project"]["version"]
            for path in ("pyproject.toml", "packages/lint/pyproject.toml")}
path = "src/lockstep/__init__.py"
for node in ast.parse(pathlib.Path(path).read_text()).body:
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
        versions[path] = ast.literal_eval(node.value)
if len(versions) != 3 or len(set(versions.values())) != 1:
    print(f"release: the versions differ: {versions}", file=sys.stderr)
    raise SystemExit(2)
print(versions["pyproject.toml"])
END
)
heading=$(grep -m 1 '^## ' CHANGELOG.md)
[[ $heading =~ ^"## $version ("[0-9]{4}-[0-9]{2}-[0-9]{2}")"$ ]] ||
  refuse "CHANGELOG.md: the newest heading is '$heading'; make it '## $version ($(date +%F))'"
[[ -z $(git tag --list "v$version") ]] || refuse "the tag v$version exists already; raise the version"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dist=dist
if [[ $rehearse ]]; then dist=$work/dist; fi
if [[ -d $dist && -n $(ls -A "$dist") ]]; then refuse "$dist holds files of an earlier build; delete them"; fi

# The build sees what git knows of, so that no file of this folder gets into a distribution by chance.
mkdir "$work/source"
git ls-files --cached --others --exclude-standard | tar --create --files-from - | tar --extract --directory "$work/source"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build twine
for package in . packages/lint; do "$work/tools/bin/python" -m build --outdir "$dist" "$work/source/$package"; done
files=("$dist"/torch_lockstep-"$version"{.tar.gz,-py3-none-any.whl} "$dist"/lockstep_lint-"$version"{.tar.gz,-py3-none-any.whl})
"$work/tools/bin/python" -m twine check --strict "${files[@]}"

"$python" -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet "${files[1]}[lint]" "${files[3]}"
bash scripts/smoke.sh "$work/env/bin"

if [[ $rehearse ]]; then echo "release: rehearsed; nothing is kept" && exit; fi
cat <<END
Built, checked and tried: version $version in $dist.

Before the upload these must have passed on this commit: make check, make test-oldest, make test-full; with GPUs, make gpu.
Then, with an account of your own at the package index:

    $python -m pip install twine && $python -m twine upload ${files[*]}
    git tag v$version && git push origin v$version
END

# SPDX-License-Identifier: Apache-2.0
#
# What the tests of kvferry run share; needs KVF_MODEL (SmolLM2) beside what common.bash needs.
# shellcheck source=common.bash disable=SC1091
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

if [[ -z ${KVF_MODEL:-} ]]; then
    echo "KVF_MODEL is not set"
    exit 77
fi
if ! "$KVFERRY" run --help >/dev/null 2>&1; then
    echo "this kvferry was built without llama.cpp"
    exit 77
fi

# answer ARGUMENT...: kvferry must end well, whatever time a model needs on a busy machine.
answer() {
    local rc=0
    timeout -k 5 200 "$KVFERRY" "$@" >"$dir/out" 2>"$dir/err" </dev/null || rc=$?
    ((rc == 0)) || flunk "kvferry $*: exit status $rc"
}

# document N: prints N sentences that differ, about 14 tokens each.
document() {
    local i
    for ((i = 1; i <= $1; i++)); do
        echo "On day $i of the journey the crew of the ferry counted $((i * 17 % 23)) seals near the pier."
    done
}

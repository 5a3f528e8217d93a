#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The man pages hold every verb, option and call, and render without a warning. bash, zsh and fish complete verbs, options,
# values, and the program after `kvferry exec --` (a shell that is not installed is left out). Two runs make the same bytes.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"
: "${KVF_BUILD:?}" "${KVF_LIB:?}" "${KVF_SOURCE:?}"

made=$KVF_BUILD/manual
[[ -f $made/kvferry.1 ]] || flunk "$made is not built"
"$python" "$KVF_SOURCE/scripts/manual.py" "$KVFERRY" "$KVF_SOURCE/include/kvferry" "$dir/again"
diff -r "$made" "$dir/again" >"$dir/out" 2>"$dir/err" || flunk "it is not what the program says, or two runs differ"

# --- man pages
for name in kvferry.1 kvferry.3; do
    if command -v groff >/dev/null; then
        groff -ww -man -Tutf8 "$made/$name" 2>"$dir/err" | sed 's/\x1b\[[0-9;]*m//g; s/‐/-/g' >"$dir/$name"
        [[ ! -s $dir/err ]] || flunk "groff warns of $name"
    fi
    if command -v mandoc >/dev/null; then
        mandoc -Tlint -W warning "$made/$name" >"$dir/out" || flunk "mandoc warns of $name"
        mandoc -Tutf8 "$made/$name" | sed $'s/.\b//g' >"$dir/$name"
    fi
done
verbs=$("$KVFERRY" --help | sed -nE '/^Verbs:/,/^$/s/^  ([a-z]+) .*/\1/p')
llama=$(grep -x exec <<<"$verbs" || true) # without llama.cpp there is no exec, run and explain
# options VERB: every --option of its help.
options() {
    "$KVFERRY" "$1" --help | sed -nE 's/^  (-., |    )(--[a-z0-9-]+)( .*)?$/\2/p'
}
[[ $(wc -w <<<"$verbs") -ge 8 && $(options put) == *--block-tokens* ]] || flunk "the help is not understood"
if [[ -f $dir/kvferry.1 ]]; then
    for verb in $verbs; do
        grep -q "^ *$verb: " "$dir/kvferry.1" || flunk "kvferry.1 has no verb $verb"
        for option in $(options "$verb"); do
            grep -qE "^ +(-., )?$option\b" "$dir/kvferry.1" || flunk "kvferry.1 has no $option of $verb"
        done
    done
    for call in $(nm -D --defined-only "$KVF_LIB" "${KVF_LIB%/*}"/libkvferry-llama.so 2>/dev/null |
        sed -nE 's/.* T (kvf_[a-z0-9_]+).*/\1/p'); do
        grep -qE "\b$call\(" "$dir/kvferry.3" || flunk "kvferry.3 does not have $call"
    done
fi

# --- bash
cat >"$dir/complete.bash" <<'END'
. "$1"
shift
[[ $(complete -p kvferry) == "complete -F _kvferry kvferry" ]] || exit 1
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_kvferry
printf '%s\n' "${COMPREPLY[@]}"
END
# in_bash WORD...: how the last word can go on.
in_bash() {
    bash --norc "$dir/complete.bash" "$made/kvferry.bash" "$@" | sort -u
}
cd "$dir"
touch model.gguf
[[ $(in_bash kvferry doc) == doctor ]] || flunk "bash: a verb"
[[ $(in_bash kvferry help sta) == stat ]] || flunk "bash: help"
for verb in $verbs; do
    [[ $(in_bash kvferry "$verb" --) == "$(options "$verb" | sort)" ]] || flunk "bash: options of $verb"
done
[[ $(in_bash kvferry get -o mod) == model.gguf ]] || flunk "bash: a file"
[[ $(in_bash kvferry put mod) == model.gguf ]] || flunk "bash: an argument"
[[ $(in_bash kvferry ls --store redis+) == redis+unix:// ]] || flunk "bash: a store"
[[ -z $(in_bash kvferry put --block-tokens "") ]] || flunk "bash: a number"
if [[ -n $llama ]]; then
    [[ $(in_bash kvferry exec -- mkfif) == mkfifo ]] || flunk "bash: a program"
    [[ $(in_bash kvferry exec -- mkfifo mod) == model.gguf ]] || flunk "bash: an argument of a program"
    [[ $(in_bash kvferry run --kv-type q5) == $'q5_0\nq5_1' ]] || flunk "bash: a type"
fi
shells=bash

# --- fish
if command -v fish >/dev/null; then
    in_fish() {
        fish --no-config -c "source '$made/kvferry.fish'; complete -C '$1'" | cut -f1 | sort
    }
    [[ $(in_fish "kvferry doc") == doctor ]] || flunk "fish: a verb"
    for verb in $verbs; do
        [[ $(in_fish "kvferry $verb --") == "$(options "$verb" | sort)" ]] || flunk "fish: options of $verb"
    done
    [[ $(in_fish "kvferry ls --store redis+") == redis+unix:// ]] || flunk "fish: a store"
    [[ -z $llama || $(in_fish "kvferry exec -- mkfif") == mkfifo ]] || flunk "fish: a program"
    shells+=", fish"
fi

# --- zsh, which completes only in a terminal: Tab must write the only way to go on
if command -v zsh >/dev/null; then
    cat >"$dir/complete.zsh" <<'END'
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "unsetopt zle_bracketed_paste prompt_cr prompt_sp; fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D; PS1='RE''ADY> '"
zpty -r -m shell seen '*READY> *' || exit 1
zpty -n -w shell "$2"$'\t'
zpty -r -m shell seen "*$2$3*" || exit 1
END
    # in_zsh TYPED ADDED
    in_zsh() {
        timeout -k 5 60 zsh -f "$dir/complete.zsh" "$made" "$1" "$2" >"$dir/out" 2>"$dir/err" || flunk "zsh: $1 is not followed by $2"
    }
    zsh -n "$made/_kvferry" || flunk "zsh: syntax"
    in_zsh "kvferry doc" tor
    for verb in $verbs; do
        in_zsh "kvferry $verb --secr" et-file
    done
    in_zsh "kvferry put --block-t" okens
    in_zsh "kvferry ls --store redis+" unix
    in_zsh "kvferry get -o mod" el.gguf
    [[ -z $llama ]] || in_zsh "kvferry exec -- mkfif" o
    shells+=", zsh"
fi
echo "man pages, and completions of $shells, say what the program says"

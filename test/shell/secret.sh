#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A tenant's secret on the command line: its sources, and what each verb shows with it and without.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

unset KVFERRY_SECRET_FILE
store=(--store "file:$dir/store")
key=$(printf '%064d' 7)
head -c 300000 /dev/urandom >"$dir/payload"
seq 1 256 >"$dir/tokens"
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$dir/new" &&
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$dir/old" && echo short >"$dir/short")
new=(--secret-file "$dir/new")
old=(--secret-file "$dir/old")

# --- the file
run 3 ls "${store[@]}" --secret-file "$dir/none"
complains "there is no secret file"
run 3 ls "${store[@]}" --secret-file "$dir/short"
complains "openssl rand -base64 32"
cp "$dir/new" "$dir/open"
chmod 640 "$dir/open"
run 3 ls "${store[@]}" --secret-file "$dir/open"
complains "chmod 600"
run 2 ls "${store[@]}" "${new[@]}" "${old[@]}" "${old[@]}"
run 2 ls "${store[@]}" --secret-file "$dir/a:b"
run 3 ls "${store[@]}" --secret-file "$dir"
complains "not a regular file"

# --- a secret that was typed is neither taken for a file nor shown again; --sealed is not taken where it means nothing
run 2 ls "${store[@]}" --secret "hunter2 hunter2 hunter2"
complains "--secret is not an option; --secret-file is"
run 2 ls "${store[@]}" --secret="hunter2 hunter2 hunter2"
complains "--secret is not an option; --secret-file is"
run 2 ls "${store[@]}" --password=hunter2
complains "--password is not an option"
! grep -q hunter2 "$dir/err" || flunk "a typed secret is shown again"
KVFERRY_SECRET_FILE='' run 2 ls "${store[@]}"
complains "KVFERRY_SECRET_FILE is empty"
KVFERRY_SECRET_FILE=":$dir/new" run 3 ls "${store[@]}"
complains "NEW:OLD"
run 2 inspect --session id --sealed "${store[@]}"
complains "--sealed needs --secret-file"
run 2 clear --all --yes --sealed "${store[@]}" "${new[@]}"
complains "--sealed goes with --session"
run 2 inspect abc --sealed "${store[@]}" "${new[@]}"
complains "--sealed goes with --session"

# --- what is stored under it is there under it
run 0 put "${fields[@]}" --tokens "$dir/tokens" --json "$dir/payload" "${store[@]}" "${old[@]}"
sealed=$(json_value 'd["block"]')
run 0 get "${fields[@]}" --tokens "$dir/tokens" -o "$dir/got" "${store[@]}" "${old[@]}"
cmp -s "$dir/payload" "$dir/got" || flunk "another payload came back"
run 0 get "${sealed:0:10}" -o "$dir/got" "${store[@]}" "${old[@]}"
cmp -s "$dir/payload" "$dir/got" || flunk "another payload came back by its key"
KVFERRY_SECRET_FILE=$dir/old run 0 get "${fields[@]}" --tokens "$dir/tokens" -o "$dir/got" "${store[@]}"
KVFERRY_SECRET_FILE=$dir/new run 0 get "${fields[@]}" --tokens "$dir/tokens" -o "$dir/got" "${store[@]}" "${old[@]}" # it goes first
KVFERRY_SECRET_FILE=$dir/none run 0 ls "${store[@]}" "${old[@]}"
run 1 get "${fields[@]}" --tokens "$dir/tokens" -o "$dir/got" "${store[@]}"
run 1 get "${fields[@]}" --tokens "$dir/tokens" -o "$dir/got" "${store[@]}" "${new[@]}"
run 1 get "${sealed:0:10}" -o "$dir/got" "${store[@]}"
complains "--secret-file"

# --- what is said without it
for other in "" "${new[*]}"; do
    # shellcheck disable=SC2086
    run 0 ls "${store[@]}" $other
    says "sealed"
    says_not "engine=test-1"
    # shellcheck disable=SC2086
    run 0 verify "${store[@]}" $other
    says "only their headers and lengths were checked"
    # shellcheck disable=SC2086
    run 0 inspect "${sealed:0:10}" "${store[@]}" $other
    says "it is sealed"
    says_not "engine=test-1"
done
run 0 ls --json "${store[@]}"
json 'd["tiers"][0]["spaces"][0]["num_sealed"] == 1 and d["tiers"][0]["spaces"][0]["fields"] is None'
run 0 inspect --json "${sealed:0:10}" "${store[@]}"
json 'd["sealed"] and d["tokens"] is None and d["num_tokens"] is None'
space=$(json_value 'd["space"]')
run 0 inspect --json "$space" "${store[@]}"
json 'd["num_tokens"] is None and d["num_prompts"] is None and d["longest_tokens"] is None and d["num_sealed"] == 1'
run 0 inspect "$space" "${store[@]}"
says "give --secret-file"
says_not "0 different first blocks"
run 0 ls --json "$space" "${store[@]}"
json 'd["tiers"][0]["blocks"][0]["num_tokens"] is None'

# --- and with it
run 0 ls "${store[@]}" "${old[@]}"
says "engine=test-1"
says "(sealed, and opened"
run 0 ls --json "${store[@]}" "${old[@]}"
json 'd["tiers"][0]["spaces"][0]["num_tokens"] == 256 and d["tiers"][0]["spaces"][0]["fields"]["model"] == "0123"'
json 'd["tiers"][0]["spaces"][0]["num_sealed"] == 0 and d["tiers"][0]["spaces"][0]["num_opened"] == 1'
run 0 inspect --json "${sealed:0:10}" "${store[@]}" "${old[@]}"
json 'd["tokens"] == list(range(1, 257)) and not d["sealed"] and d["opened"]'
run 0 verify "${store[@]}" "${old[@]}"
says_not "sealed"
says "2 records and 0 sessions"

# --- one secret in the place of another
run 0 get "${fields[@]}" --tokens "$dir/tokens" -o "$dir/got" "${store[@]}" "${new[@]}" "${old[@]}"
cmp -s "$dir/payload" "$dir/got" || flunk "another payload came back under two secrets"
run 0 get "${fields[@]}" --tokens "$dir/tokens" -o "$dir/got" "${store[@]}" "${new[@]}"
cmp -s "$dir/payload" "$dir/got" || flunk "it was not sealed anew"
run 0 ls "${store[@]}" "${new[@]}"
says "engine=test-1" # its card, too
KVFERRY_SECRET_FILE=$dir/new:$dir/old run 0 verify "${store[@]}"
says_not "sealed"

# --- a sealed session: its id is in it
KVFERRY_SECRET_FILE=$dir/new "${KVF_BUILD:?the build folder}/test/session_tool" save "file:$dir/sessions" "chat 1" "$dir/tokens" "$dir/tokens"
run 0 ls --store "file:$dir/sessions" "${new[@]}"
says "(sealed: inspect --session ID --sealed)"
says "?"
says_not "kvf1/"
run 0 ls --json --store "file:$dir/sessions" "${new[@]}"
json '[(s["session"], s["ttl_ms"], s["sealed"]) for s in d["tiers"][0]["sessions"]] == [(None, None, True)]'
run 0 inspect --session "chat 1" --sealed --store "file:$dir/sessions" "${new[@]}"
says "chat 1"

# --- damage inside is seen with the secret only
file=$(find "$dir/store" -type f -size +200k | head -1)
printf 'x' | dd of="$file" bs=1 seek=2000 conv=notrunc status=none
run 0 verify "${store[@]}"
run 1 verify "${store[@]}" "${new[@]}" "${old[@]}"
says "checksum"

# --- nobody else's key helps
run 1 get "${fields[@]}" --key "$key" -o "$dir/got" "${store[@]}" "${new[@]}"

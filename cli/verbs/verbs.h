/* SPDX-License-Identifier: Apache-2.0
 *
 * The verbs, one file for each: each parses its own arguments and returns an exit code. argv[0] is the verb.
 */
#ifndef KVFCLI_VERBS_H
#define KVFCLI_VERBS_H

int kvfcli_ls(int argc, char **argv);
int kvfcli_inspect(int argc, char **argv);
int kvfcli_get(int argc, char **argv);
int kvfcli_put(int argc, char **argv);
int kvfcli_verify(int argc, char **argv);
int kvfcli_clear(int argc, char **argv);
int kvfcli_doctor(int argc, char **argv);
int kvfcli_stat(int argc, char **argv);
int kvfcli_exec(int argc, char **argv);

#endif

/* attention.h: what the CPU's two kernels of attention share.
 *
 * The work of a call is *tasks*: each is a tile of query rows and a split of the keys that they
 * see. If splits of a tile run in parallel, a second loop of tasks folds what they leave. A kernel
 * has a file that cuts calls into its tasks:
 *   mqa.c   keys are latents, which all heads share, in lists or in a table; a tile is a token
 *   mha.c   keys and values of each KV head, ragged or in pages; a tile is rows of a request and
 *           a KV head
 * attention.c runs the tasks of both.
 */
#pragma once

#include "core/attention/params_attention.h"
#include "core/backend.h"
#include "core/params_merge.h"

struct smla_cpu_isa;
struct smla_norm_isa;
struct smla_thread_scratch;

/* What the tasks of a call share. */
typedef struct smla_attention_work {
    const smla_attention_params *params;
    const struct smla_cpu_isa *isa;
    const struct smla_thread_scratch *scratch;
    void *cut; /* what only the kernel's own tasks read */
} smla_attention_work;

/* Tasks that run in parallel, in any order. */
typedef struct smla_attention_loop {
    int64_t num_tasks;
    int num_threads;
    void (*run)(const smla_attention_work *work, int64_t task);
} smla_attention_loop;

/* Runs one loop after the other. */
smla_status smla_run_attention(const smla_attention_work *work, const smla_attention_loop *loops,
                               int num_loops, smla_error *error);

/* What a kernel takes of a thread's scratch: numbers, because those of other instruction sets are
 * read, too, and code of theirs may not run. */
typedef struct smla_attention_scratch {
    int64_t bytes;        /* a call of any shape takes these */
    int64_t bytes_per[2]; /* and these times two numbers, which the kernel's header tells */
} smla_attention_scratch;

/* Merges the parts of one row. merge.c */
void smla_cpu_merge_row(const struct smla_norm_isa *norm, const smla_merge_rows *merged,
                        const smla_merge_part *parts, int64_t num_parts, int64_t token,
                        int64_t head);

/* ---- What the CPU backend exports ---------------------------------------------------------- */

smla_status smla_cpu_find_key_ranges(const smla_key_ranges_params *params, smla_error *error);
const char *smla_cpu_kernel_name(const smla_attention_run *run);

/* The split count depends on shapes alone. No result depends on the number of threads. */
void smla_cpu_plan_attention(const smla_attention_shape *shape, smla_attention_plan *plan);
bool smla_cpu_prefers_direct(const smla_attention_shape *prefills, int64_t num_rows,
                             int64_t num_chunks);

/* Enough for every thread of this process. The size never falls when num_tokens grows, and no
 * longer grows from 64 parts on, so the size for the largest batch serves all batches. */
int64_t smla_cpu_attention_workspace_size(const smla_attention_shape *shape);

/* top_k_merge.c: top_k_merge. The lists of a token are merged into one row of scores, in the order
 * of positions. The columns that top_k_per_row chooses of this row are the result, so order and the
 * rule for equal scores are the same.
 *
 * A thread takes a token at a time, with a row of all its positions and scores.
 */
#include <assert.h>

#include "core/params_topk.h"
#include "cpu/cpu.h"
#include "cpu/index/slot.h"
#include "cpu/isa.h"
#include "cpu/machine/thread_scratch.h"
#include "cpu/topk/select.h"
#include "sparse_mla/topk.h"

/* Below so many entries, starting threads costs more than they save. */
enum { MIN_PARALLEL_ENTRIES = 1 << 13 };

/* Memory of a thread. */
typedef struct merged_row {
    smla_select_scratch select;
    uint32_t values[]; /* [N * K] scores, bf16 or fp32; behind them as many positions */
} merged_row;

/* The first position of a list that is not merged yet, and the list's number, as one number that
 * grows with the position. */
typedef uint64_t list_head;

/* The heads of the lists that are not merged whole, as a heap: none is below head (i - 1) / 2. */
typedef struct list_heads {
    int count;
    list_head heads[SMLA_MAX_MERGED_LISTS];
    int64_t columns[SMLA_MAX_MERGED_LISTS]; /* the column of each list's head */
} list_heads;

/* Puts `head` in the place of the first head. */
static void
sink_head(list_heads *heap, list_head head)
{
    int place = 0;
    for (int child = 1; child < heap->count; child = 2 * place + 1) {
        child += child + 1 < heap->count && heap->heads[child + 1] < heap->heads[child];
        if (heap->heads[child] >= head) {
            break;
        }
        heap->heads[place] = heap->heads[child];
        place = child;
    }
    heap->heads[place] = head;
}

/* Finds the head of a list from `column` on. Returns whether there is one. */
static bool
find_head(const smla_top_k_merge_params *p, int64_t token, int list, int64_t column,
          list_heads *heap, list_head *head)
{
    const int32_t *const positions =
        p->indices + list * p->indices_stride_list + token * p->indices_stride_token;
    while (column < p->num_columns && positions[column] < 0) {
        column++;
    }
    if (column == p->num_columns) {
        return false;
    }
    heap->columns[list] = column;
    *head = (list_head)(uint32_t)positions[column] << 32 | (uint32_t)list;
    return true;
}

/* All heads begin at the end of the heap and rise. */
static void
open_heads(const smla_top_k_merge_params *p, int64_t token, list_heads *heap)
{
    heap->count = 0;
    for (int list = 0; list < p->num_lists; list++) {
        list_head head;
        if (!find_head(p, token, list, 0, heap, &head)) {
            continue;
        }
        int place = heap->count++;
        for (; place > 0 && heap->heads[(place - 1) / 2] > head; place = (place - 1) / 2) {
            heap->heads[place] = heap->heads[(place - 1) / 2];
        }
        heap->heads[place] = head;
    }
}

/* Merges the lists of a token; returns the number of their entries. */
static int64_t
merge_lists(const smla_top_k_merge_params *p, int64_t token, int32_t *positions, void *values)
{
    list_heads heap;
    int64_t count = 0;
    open_heads(p, token, &heap);
    while (heap.count > 0) {
        list_head head = heap.heads[0];
        const int list = (int)(uint32_t)head;
        const int64_t from =
            list * p->values_stride_list + token * p->values_stride_token + heap.columns[list];
        positions[count] = (int32_t)(head >> 32);
        if (p->is_bf16) {
            ((uint16_t *)values)[count] = ((const uint16_t *)p->values)[from];
        } else {
            ((uint32_t *)values)[count] = ((const uint32_t *)p->values)[from];
        }
        count++;
        if (!find_head(p, token, list, heap.columns[list] + 1, &heap, &head)) {
            head = heap.heads[--heap.count]; /* the last head takes the place of the list's */
        }
        sink_head(&heap, head);
    }
    return count;
}

static void
write_token(const smla_top_k_merge_params *p, int64_t token, merged_row *row,
            const smla_select_isa *isa)
{
    int32_t *const out = p->out + token * p->out_stride_token;
    assert(row != NULL); /* every call has scratch */
    int32_t *const positions = (int32_t *)(row->values + p->num_lists * p->num_columns);
    const int64_t count = merge_lists(p, token, positions, row->values);
    const smla_logit_rows scores = {.data = row->values, .is_bf16 = p->is_bf16, .count = count};
    smla_cpu_choose_columns(isa, &scores, p->k, &row->select, out);
    for (int64_t i = 0; i < p->k && out[i] >= 0; i++) {
        out[i] = positions[out[i]];
    }
}

smla_status
smla_cpu_top_k_merge(const smla_top_k_merge_params *p, smla_error *error)
{
    const int64_t num_entries = p->num_lists * p->num_columns;
    const bool is_small = p->num_tokens * num_entries < MIN_PARALLEL_ENTRIES;
    const smla_cpu_isa *isa = NULL;
    smla_thread_scratch scratch;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    const smla_scratch_size size = {
        .num_parts = is_small ? 1 : smla_count_threads(p->num_tokens),
        .part_bytes = (int64_t)sizeof(merged_row) + num_entries * 2 * (int64_t)sizeof(int32_t),
    };
    SMLA_TRY(smla_open_scratch(&scratch, p->call.op, size, error));
    smla_interrupt *const interrupt = smla_find_interrupt();
#pragma omp parallel for schedule(dynamic, 1) \
    num_threads(smla_divide_scratch(&scratch, p->num_tokens))
    for (int64_t token = 0; token < p->num_tokens; token++) {
        if (!smla_is_ended(interrupt)) {
            write_token(p, token, smla_own_scratch(&scratch), isa->select);
        }
    }
    smla_close_scratch(&scratch);
    return smla_check_ended(p->call.op, interrupt, error);
}

/* ranges.c: attention on lists that no public operator makes yet: dense columns, a `begin` per
 * token, positions that a block table maps to slots. buildtools/graph.py makes a library of it,
 * whose only function tests/attention/test_ranges.py calls on either device.
 */
#include <string.h>

#include "../fake_cuda/shape.h"
#include "ops/check.h"

/* What is changed in the main list behind the check. All arrays are contiguous. */
typedef struct test_ranges {
    const int32_t *begin;       /* [T], NULL: none */
    const int32_t *end;         /* [T], NULL: none */
    const int32_t *block_table; /* [R, W], NULL: indices are slots */
    const int32_t *req_id_per_token;
    int64_t num_reqs;
    int64_t num_blocks;
    int32_t is_dense;
} test_ranges;

/* q, kv_cache, indices, out, lse, workspace. */
enum { NUM_ARRAYS = 6 };

static smla_status
attend(DLTensor *const arrays[NUM_ARRAYS], double softmax_scale, int num_splits,
       const test_ranges *ranges, smla_error *error)
{
    const smla_sparse_attention_args args = {
        .struct_size = sizeof args,
        .q = arrays[0],
        .kv_cache = arrays[1],
        .indices = arrays[2],
        .out = arrays[3],
        .lse = arrays[4],
        .workspace = arrays[5],
        .softmax_scale = softmax_scale,
        .num_splits = num_splits,
    };
    smla_attention_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_check_sparse_attention(&args, &params, &backend, error));
    smla_key_list *const list = &params.keys.lists[0];
    if (ranges->is_dense) {
        list->indices = NULL;
    }
    list->begin = ranges->begin;
    list->begin_stride = 1;
    list->end = ranges->end;
    list->end_stride = 1;
    list->map = (smla_index_map){
        .block_table = ranges->block_table,
        .block_table_stride_req = ranges->num_blocks,
        .block_table_stride_block = 1,
        .num_reqs = ranges->num_reqs,
        .num_blocks = ranges->num_blocks,
        .req_id_per_token = ranges->req_id_per_token,
    };
    params.results.num_splits = num_splits;
    smla_attention_shape shape = shape_of(&params);
    shape.needs |= smla_has_ranges(list) ? SMLA_NEEDS_RANGES : 0;
    backend->plan_attention(&shape, &params.plan);
    params.results.num_splits = params.plan.runs[0].num_splits;
    return backend->attend(&params, error);
}

int test_attend(DLTensor *const arrays[NUM_ARRAYS], double softmax_scale, int num_splits,
                const test_ranges *ranges, char *text);

/* `text` has room for smla_error.text. */
__attribute__((visibility("default"))) int
test_attend(DLTensor *const arrays[NUM_ARRAYS], double softmax_scale, int num_splits,
            const test_ranges *ranges, char *text)
{
    smla_error error = {0};
    const smla_status status = attend(arrays, softmax_scale, num_splits, ranges, &error);
    memcpy(text, error.text, sizeof error.text);
    return (int)status;
}

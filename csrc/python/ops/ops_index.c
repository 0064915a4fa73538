/* ops_index.c: positions become slots, or those of a rank; the index lists of DeepSeek V4. */
#include "python/call/operator.h"

/* ---- Positions to slots -------------------------------------------------------------------- */

SMLA_PY_COMPUTE(convert_req_index_to_global_index)

enum { CONVERT_TOPK = 2, CONVERT_OUT = 5, CONVERT_COUNTS };

static const smla_py_param convert_params[] = {
    {"req_id_per_token", SMLA_PY_INPUT, offsetof(smla_convert_req_index_args, req_id_per_token)},
    {"block_table", SMLA_PY_INPUT, offsetof(smla_convert_req_index_args, block_table)},
    [CONVERT_TOPK] = {"topk_indices", SMLA_PY_INPUT,
                      offsetof(smla_convert_req_index_args, topk_indices)},
    {"prefill_request_ids", SMLA_PY_OPTIONAL,
     offsetof(smla_convert_req_index_args, prefill_request_ids)},
    {"prefill_workspace_starts", SMLA_PY_OPTIONAL,
     offsetof(smla_convert_req_index_args, prefill_workspace_starts)},
    [CONVERT_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_convert_req_index_args, out)},
    [CONVERT_COUNTS] = {"counts", SMLA_PY_ASKED_RESULT,
                        offsetof(smla_convert_req_index_args, counts)},
    {"block_size", SMLA_PY_INT, offsetof(smla_convert_req_index_args, block_size)},
    {"valid_counts", SMLA_PY_ASK, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_convert_req_index_args, stream)},
};

static const smla_py_result_row convert_results[] = {
    {SMLA_PY_MAKES(CONVERT_OUT, INT32, SMLA_PY_ALL_SIZES(CONVERT_TOPK))},
    {SMLA_PY_MAKES(CONVERT_COUNTS, INT32, SMLA_PY_SIZE(CONVERT_TOPK, 0))},
};

static const smla_py_limit convert_limits[] = {{SMLA_PY_LIMIT_NDIM, CONVERT_TOPK, 2, 2}};

/* ---- Top-k positions to slots -------------------------------------------------------------- */

SMLA_PY_COMPUTE(compute_global_topk_indices_and_lens)

enum { GLOBAL_TOPK, GLOBAL_OUT = 4, GLOBAL_LENS };

static const smla_py_param global_topk_params[] = {
    [GLOBAL_TOPK] = {"topk_indices", SMLA_PY_INPUT, offsetof(smla_topk_slots_args, topk_indices)},
    {"req_id_per_token", SMLA_PY_INPUT, offsetof(smla_topk_slots_args, req_id_per_token)},
    {"block_table", SMLA_PY_INPUT, offsetof(smla_topk_slots_args, block_table)},
    {"is_valid", SMLA_PY_OPTIONAL, offsetof(smla_topk_slots_args, is_valid)},
    [GLOBAL_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_topk_slots_args, out)},
    [GLOBAL_LENS] = {"lens", SMLA_PY_OUTPUT, offsetof(smla_topk_slots_args, lens)},
    {"block_size", SMLA_PY_INT, offsetof(smla_topk_slots_args, block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_topk_slots_args, stream)},
};

static const smla_py_result_row global_topk_results[] = {
    {SMLA_PY_MAKES(GLOBAL_OUT, INT32, SMLA_PY_ALL_SIZES(GLOBAL_TOPK))},
    {SMLA_PY_MAKES(GLOBAL_LENS, INT32, SMLA_PY_SIZE(GLOBAL_TOPK, 0))},
};

static const smla_py_limit global_topk_limits[] = {{SMLA_PY_LIMIT_NDIM, GLOBAL_TOPK, 2, 2}};

/* ---- Workspace rows of a prefill chunk ----------------------------------------------------- */

SMLA_PY_COMPUTE(combine_topk_swa_indices)

enum {
    COMBINE_TOPK,
    COMBINE_OUT = 4,
    COMBINE_LENS,
    COMBINE_WINDOW,
    COMBINE_COLUMNS = 8,
    COMBINE_ALIGN = 11
};

static const smla_py_param combine_params[] = {
    [COMBINE_TOPK] = {"topk_indices", SMLA_PY_INPUT,
                      offsetof(smla_combine_topk_swa_args, topk_indices)},
    {"query_start_loc", SMLA_PY_INPUT, offsetof(smla_combine_topk_swa_args, query_start_loc)},
    {"seq_lens", SMLA_PY_INPUT, offsetof(smla_combine_topk_swa_args, seq_lens)},
    {"gather_lens", SMLA_PY_INPUT, offsetof(smla_combine_topk_swa_args, gather_lens)},
    [COMBINE_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_combine_topk_swa_args, out)},
    [COMBINE_LENS] = {"lens", SMLA_PY_OUTPUT, offsetof(smla_combine_topk_swa_args, lens)},
    [COMBINE_WINDOW] = {"window", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, window)},
    {"ratio", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, ratio)},
    [COMBINE_COLUMNS] = {"topk", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, topk)},
    {"M", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, M)},
    {"N", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, N)},
    [COMBINE_ALIGN] = {"align", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, align)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_combine_topk_swa_args, stream)},
};

static const smla_py_result_row combine_results[] = {
    {SMLA_PY_MAKES(COMBINE_OUT, INT32, SMLA_PY_SIZE(COMBINE_TOPK, 0),
                   {{SMLA_PY_ADD, SMLA_PY_VALUE_OF, COMBINE_COLUMNS, 0},
                    {SMLA_PY_ADD, SMLA_PY_VALUE_OF, COMBINE_WINDOW, 0},
                    {SMLA_PY_ROUND_UP, SMLA_PY_VALUE_OF, COMBINE_ALIGN, 0}})},
    {SMLA_PY_MAKES(COMBINE_LENS, INT32, SMLA_PY_SIZE(COMBINE_TOPK, 0))},
};

static const smla_py_limit combine_limits[] = {
    {SMLA_PY_LIMIT_NDIM, COMBINE_TOPK, 2, 2},
    {SMLA_PY_LIMIT_VALUE, COMBINE_WINDOW, 1, INT32_MAX},
    {SMLA_PY_LIMIT_VALUE, COMBINE_COLUMNS, 0, INT32_MAX},
    {SMLA_PY_LIMIT_VALUE, COMBINE_ALIGN, 1, INT32_MAX},
    {SMLA_PY_LIMIT_COLUMNS, COMBINE_COLUMNS, COMBINE_TOPK, 0},
};

/* ---- Slots of a mixed batch ---------------------------------------------------------------- */

SMLA_PY_COMPUTE(build_mixed_sparse_indices)

enum {
    MIXED_SWA,
    MIXED_COMPRESSED,
    MIXED_PREFILL = 3,
    MIXED_REQ_IDS = 6,
    MIXED_OUT = 10,
    MIXED_LENS,
    MIXED_WINDOW = 14,
    MIXED_TOPK = 16
};

static const smla_py_param mixed_params[] = {
    [MIXED_SWA] = {"decode_swa_indices", SMLA_PY_OPTIONAL,
                   offsetof(smla_mixed_indices_args, decode_swa_indices)},
    [MIXED_COMPRESSED] = {"decode_compressed_indices", SMLA_PY_OPTIONAL,
                          offsetof(smla_mixed_indices_args, decode_compressed_indices)},
    {"decode_compressed_lens", SMLA_PY_OPTIONAL,
     offsetof(smla_mixed_indices_args, decode_compressed_lens)},
    [MIXED_PREFILL] = {"prefill_topk_indices", SMLA_PY_OPTIONAL,
                       offsetof(smla_mixed_indices_args, prefill_topk_indices)},
    {"query_start_loc", SMLA_PY_INPUT, offsetof(smla_mixed_indices_args, query_start_loc)},
    {"seq_lens", SMLA_PY_INPUT, offsetof(smla_mixed_indices_args, seq_lens)},
    [MIXED_REQ_IDS] = {"req_id_per_token", SMLA_PY_INPUT,
                       offsetof(smla_mixed_indices_args, req_id_per_token)},
    {"swa_block_table", SMLA_PY_INPUT, offsetof(smla_mixed_indices_args, swa_block_table)},
    {"compressed_block_table", SMLA_PY_OPTIONAL,
     offsetof(smla_mixed_indices_args, compressed_block_table)},
    {"is_valid", SMLA_PY_OPTIONAL, offsetof(smla_mixed_indices_args, is_valid)},
    [MIXED_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_mixed_indices_args, out)},
    [MIXED_LENS] = {"lens", SMLA_PY_OUTPUT, offsetof(smla_mixed_indices_args, lens)},
    {"swa_block_size", SMLA_PY_INT, offsetof(smla_mixed_indices_args, swa_block_size)},
    {"compressed_block_size", SMLA_PY_INT,
     offsetof(smla_mixed_indices_args, compressed_block_size)},
    [MIXED_WINDOW] = {"window", SMLA_PY_INT, offsetof(smla_mixed_indices_args, window)},
    {"ratio", SMLA_PY_INT, offsetof(smla_mixed_indices_args, ratio)},
    [MIXED_TOPK] = {"topk", SMLA_PY_INT, offsetof(smla_mixed_indices_args, topk)},
    {"decode_indices_are_local", SMLA_PY_FLAG,
     offsetof(smla_mixed_indices_args, decode_indices_are_local)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_mixed_indices_args, stream)},
};

/* With prefills the lists of both parts tell the number of tokens, else the request ids. */
#define MIXED_BOTH                                   \
    {{SMLA_PY_ADD, SMLA_PY_SIZE_OR_0, MIXED_SWA, 0}, \
     {SMLA_PY_ADD, SMLA_PY_SIZE_OF, MIXED_PREFILL, 0}}
#define MIXED_COLUMNS                                            \
    {{SMLA_PY_ADD, SMLA_PY_VALUE_OF, MIXED_TOPK, 0},             \
     {SMLA_PY_RAISE_TO, SMLA_PY_SIZE_OR_0, MIXED_COMPRESSED, 1}, \
     {SMLA_PY_ROUND_UP, SMLA_PY_CONSTANT, 0, 4},                 \
     {SMLA_PY_ADD, SMLA_PY_VALUE_OF, MIXED_WINDOW, 0}}

static const smla_py_result_row mixed_results[] = {
    {SMLA_PY_MAKES(MIXED_OUT, INT32, MIXED_BOTH, MIXED_COLUMNS),
     .when = {SMLA_PY_IF_GIVEN, MIXED_PREFILL, 0}},
    {SMLA_PY_MAKES(MIXED_OUT, INT32, SMLA_PY_SIZE(MIXED_REQ_IDS, 0), MIXED_COLUMNS)},
    {SMLA_PY_MAKES(MIXED_LENS, INT32, MIXED_BOTH), .when = {SMLA_PY_IF_GIVEN, MIXED_PREFILL, 0}},
    {SMLA_PY_MAKES(MIXED_LENS, INT32, SMLA_PY_SIZE(MIXED_REQ_IDS, 0))},
};

static const smla_py_limit mixed_limits[] = {
    {SMLA_PY_LIMIT_NDIM, MIXED_SWA, 2, 2},
    {SMLA_PY_LIMIT_NDIM, MIXED_COMPRESSED, 2, 2},
    {SMLA_PY_LIMIT_NDIM, MIXED_PREFILL, 2, 2},
    {SMLA_PY_LIMIT_NDIM, MIXED_REQ_IDS, 1, 1},
    {SMLA_PY_LIMIT_VALUE, MIXED_WINDOW, 1, INT32_MAX},
    {SMLA_PY_LIMIT_VALUE, MIXED_TOPK, 0, INT32_MAX},
};

/* ---- What a rank of context parallelism has ------------------------------------------------ */

/* In each args the integers of `cp` follow each other. */
#define ASSERT_SHARE(args)                                                                         \
    _Static_assert(offsetof(args, cp_interleave) == offsetof(args, cp_rank) + 2 * sizeof(int64_t), \
                   "the integers of a tuple follow each other")

ASSERT_SHARE(smla_cp_positions_args);
ASSERT_SHARE(smla_cp_topk_args);
ASSERT_SHARE(smla_cp_lengths_args);

SMLA_PY_COMPUTE(cp_local_positions)

enum { OWN_POSITIONS_IN, OWN_POSITIONS_OUT };

static const smla_py_param own_positions_params[] = {
    [OWN_POSITIONS_IN] = {"positions", SMLA_PY_INPUT, offsetof(smla_cp_positions_args, positions)},
    [OWN_POSITIONS_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_cp_positions_args, out)},
    {"cp", SMLA_PY_THREE_INTS, offsetof(smla_cp_positions_args, cp_rank)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_cp_positions_args, stream)},
};

static const smla_py_result_row own_positions_results[] = {
    {.result = OWN_POSITIONS_OUT,
     .dtype = {.source = SMLA_PY_INTEGERS_OF_ARRAY, .row = OWN_POSITIONS_IN},
     .dims = {SMLA_PY_ALL_SIZES(OWN_POSITIONS_IN)}},
};

static const smla_py_limit own_positions_limits[] = {{SMLA_PY_LIMIT_NDIM, OWN_POSITIONS_IN, 1, 2}};

SMLA_PY_COMPUTE(cp_local_topk)

enum { OWN_TOPK_IN, OWN_TOPK_OUT, OWN_TOPK_LENS };

static const smla_py_param own_topk_params[] = {
    [OWN_TOPK_IN] = {"topk_indices", SMLA_PY_INPUT, offsetof(smla_cp_topk_args, topk_indices)},
    [OWN_TOPK_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_cp_topk_args, out)},
    [OWN_TOPK_LENS] = {"lens", SMLA_PY_OUTPUT, offsetof(smla_cp_topk_args, lens)},
    {"cp", SMLA_PY_THREE_INTS, offsetof(smla_cp_topk_args, cp_rank)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_cp_topk_args, stream)},
};

static const smla_py_result_row own_topk_results[] = {
    {SMLA_PY_MAKES(OWN_TOPK_OUT, INT32, SMLA_PY_ALL_SIZES(OWN_TOPK_IN))},
    {SMLA_PY_MAKES(OWN_TOPK_LENS, INT32, SMLA_PY_SIZE(OWN_TOPK_IN, 0))},
};

static const smla_py_limit own_topk_limits[] = {{SMLA_PY_LIMIT_NDIM, OWN_TOPK_IN, 2, 2}};

SMLA_PY_COMPUTE(cp_local_lengths)

enum { OWN_LENGTHS_IN, OWN_LENGTHS_OUT };

static const smla_py_param own_lengths_params[] = {
    [OWN_LENGTHS_IN] = {"seq_lens", SMLA_PY_INPUT, offsetof(smla_cp_lengths_args, seq_lens)},
    [OWN_LENGTHS_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_cp_lengths_args, out)},
    {"cp", SMLA_PY_THREE_INTS, offsetof(smla_cp_lengths_args, cp_rank)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_cp_lengths_args, stream)},
};

static const smla_py_result_row own_lengths_results[] = {
    {SMLA_PY_MAKES(OWN_LENGTHS_OUT, INT32, SMLA_PY_ALL_SIZES(OWN_LENGTHS_IN))},
};

static const smla_py_limit own_lengths_limits[] = {{SMLA_PY_LIMIT_NDIM, OWN_LENGTHS_IN, 1, 1}};

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_index_operators[] = {
    {SMLA_PY_OPERATOR(convert_req_index_to_global_index, convert, smla_convert_req_index_args)},
    {SMLA_PY_OPERATOR(compute_global_topk_indices_and_lens, global_topk, smla_topk_slots_args)},
    {SMLA_PY_OPERATOR(combine_topk_swa_indices, combine, smla_combine_topk_swa_args)},
    {SMLA_PY_OPERATOR(build_mixed_sparse_indices, mixed, smla_mixed_indices_args)},
    {SMLA_PY_OPERATOR(cp_local_positions, own_positions, smla_cp_positions_args)},
    {SMLA_PY_OPERATOR(cp_local_topk, own_topk, smla_cp_topk_args)},
    {SMLA_PY_OPERATOR(cp_local_lengths, own_lengths, smla_cp_lengths_args)},
    {.name = NULL},
};

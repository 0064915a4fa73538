/* paged_attention_sm90.cu: attention over keys and values of KV heads in pages for Hopper, with
 * wgmma: decodes and extends of rows of 64, 128 and 256. paged_attention.cu serves all other calls.
 *
 * Computes     s_j = softmax_scale * log2(e) * (q . k_j), perhaps capped,
 *              w_j = 2^(s_j - ref) for the keys that the row sees (visible.h),
 *              out = sum_j w_j v_j / sum_j w_j / (1 + e^(sink - lse)),
 *              lse = ref * ln 2 + ln(sum_j w_j)
 * Shapes       q [T][H][D], k [P][ps][Hk][D], v [P][ps][Hk][D] bf16 or fp16, D 64, 128 or 256;
 *              pages of any size by block table, or slots. Addresses and strides are multiples of
 *              16 bytes. out [T][H][D] of q's type or fp32, likewise; lse [T][H] fp32, any
 *              strides.
 * Shared mem   rows lie in segments of 64 columns, swizzled by 128 bytes; in bytes
 *                D    queries [2 groups][64 rows]  buffers of a block's keys or values  keys
 *                64   16,384                       13 x 16,384                          128
 *                128  32,768                        6 x 32,768                          128
 *                256  65,536                        5 x 32,768                           64
 *              and up to 3072 of items, limits of rows, bits of hidden keys and mbarriers
 * Roles        One CTA per SM. It takes items: rows of a tile, and blocks of their keys, from the
 *              first one on (paged_items.cuh). Rows are (token, head of the group) pairs.
 *              4 gather warps  plan items, and bring queries and rows of keys and values by
 *                              cp.async; at last they fill the rows of no request, if the call made
 *                              its results. 88 registers.
 *              2 groups        64 rows each, 208 registers. An item of up to 64 rows is one
 *                              group's, and the groups take such items in turn; of a larger one
 *                              both groups have rows, and take turns at products.
 *              mbarriers       arrivals | waiting threads
 *              q_full[2]       each gather thread's copies | the group
 *              q_empty[2]      a lane per warp of the group, when the item's scores are there |
 *                              gather warps
 *              full[]          each gather thread's copies, and a lane per gather warp, when bits
 *                              of hidden keys are written | the item's groups
 *              empty[]         a lane per warp of the item's groups, as two where there is one
 *                              group | gather warps, and groups that follow the other one
 *              item_full[4]    each gather thread | groups
 *              item_empty[4]   each consumer thread | gather warps
 *              named barriers
 *              GROUP_BARRIER   the group | the same
 *              GATHER_BARRIER  gather threads | the same
 *              TURN            the group that passes the turn | the group that takes it
 * Roofline     A decode reads 4 D bytes of a key and KV head. H 32/8, D 128, 64 x 8192 keys: 2.15
 *              GB, 499 us at 4.30 TB/s. A block of 128 keys comes in 3500 cycles of an SM then, and
 *              one group needs 1024 for products and about 700 for weights. An extend of two
 *              groups' rows takes the tensor cores 2048 for it, and they bind.
 * Numerics     Scores and out are fp32 sums by tensor cores. Weights are rounded once, to the type
 *              of the operands; their sum is not rounded to it, and is compensated from block to
 *              block. ref is the largest logit of the row's first block with one, and moves to a
 *              larger one only if that is 2^32 heavier, in fp16 2^8. Hidden keys, and those that no
 *              row of the tile sees, are zeros. A NaN value in a key that only a mask hides makes
 *              0 * NaN. No key: out 0, lse -inf. Blocks begin at multiples of their size from the
 *              request's key 0, and a block that a row does not see changes none of its bits: a
 *              row's bits depend on its query, its request's keys and, where tiles are cut, on the
 *              blocks at which that happens, so on the batch and the number of SMs. Whatever page a
 *              key is in, it is the same row of its block.
 * Source       mha_attention_sm90.cu for products, turns and weights; attention_dense_sm90.cu for
 *              gather warps and equal runs of keys.
 */
#include <float.h>

#include "cuda/attention/sm90/paged/paged_gather.cuh"
#include "cuda/attention/sm90/paged/paged_steps.cuh"
#include "cuda/attention/table/kernels.h"

namespace {

template <int D, bool HALF>
__global__ void
__launch_bounds__(PAGED_THREADS, 1) attend_paged(const __grid_constant__ paged_args args)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    paged_memory<D> *const shared = (paged_memory<D> *)memory;
    /* The shuffle lets ptxas know that all lanes agree. */
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / SMLA_WARP_LANES, 0);
    if (threadIdx.x == 0) {
        start_memory(shared);
    }
    __syncthreads(); /* all threads see the barriers */
    ptx_wait_for_grids();
    if (warp < GATHER_WARPS) {
        ptx_release_registers<GATHER_REGISTERS>();
        gather_items<D>(args, shared);
        smla_fill_rows_of_none(&args.p.padding, &args.p.visible.reqs, blockIdx.x, gridDim.x,
                               (int)threadIdx.x, GATHER_THREADS);
    } else {
        ptx_claim_registers<CONSUMER_REGISTERS>();
        consume_items<D, HALF>(args, warp / GROUP_WARPS - 1, warp % GROUP_WARPS, shared);
    }
}

/* ---- Launcher ------------------------------------------------------------------------------ */

static_assert((int)TILE_ROWS == (int)SMLA_MHA_TILE_ROWS, "run_attention.c counts them");

bool
are_rows_aligned(const smla_attention_params &p)
{
    const smla_head_rows *const rows[] = {&p.queries.parts[SMLA_NOPE], &p.kv.rows[SMLA_NOPE],
                                          &p.kv.rows[SMLA_VALUES]};
    bool is_aligned =
        (p.pages.strides_page[SMLA_NOPE] | p.pages.strides_page[SMLA_VALUES]) % 8 == 0;
    for (const smla_head_rows *part : rows) {
        is_aligned = is_aligned &&
                     smla_are_rows_aligned(part->data, part->stride_token, part->stride_head, 16);
    }
    return is_aligned;
}

/* The most positions of a request for which its row of the table has an entry. */
int64_t
count_most_keys(const smla_kv_pages &pages)
{
    const int64_t most = INT32_MAX / pages.table.block_size;
    return (pages.table.num_blocks < most ? pages.table.num_blocks : most) * pages.table.block_size;
}

/* A window's number of keys, in 32 bits: no request has more keys than that. */
int32_t
clamp_keys(int64_t keys)
{
    return (int32_t)(keys < INT32_MAX - 1 ? keys : INT32_MAX - 1);
}

paged_args
make_args(const smla_attention_params &p)
{
    const int64_t out_bytes = p.results.out_type == SMLA_FLOAT_FP32 ? 4 : 2;
    const double log2_e = 1.4426950408889634074;
    const float scale = (float)(p.logits.softmax_scale * log2_e);
    const smla_range_rule &rule = p.visible.rule;
    paged_args args = {};
    args.p = mha_params_of(&p);
    args.pages = kv_pages_of(p.pages, p.kv.type);
    args.group = smla_make_divisor(p.queries.num_heads / p.kv.num_kv_heads);
    args.out_token_bytes = p.results.out_stride_token * out_bytes;
    args.out_head_bytes = p.results.out_stride_head * out_bytes;
    args.num_reqs = (int32_t)p.visible.reqs.num_reqs;
    args.most_keys = (int32_t)count_most_keys(p.pages);
    args.left = clamp_keys(rule.left);
    args.right = clamp_keys(rule.right);
    args.has_shares = rule.chunk > 0 || rule.share.size > 0;
    args.is_early = p.logits.softcap != 0.0f || !(scale > 0.0f);
    args.scale = args.is_early ? 1.0f : scale;
    args.early_scale = scale;
    args.cap_log2 = (float)(p.logits.softcap * log2_e);
    args.cap_exponent =
        (float)fmin(fabs(2.0 * log2_e * p.logits.softmax_scale / p.logits.softcap), FLT_MAX);
    return args;
}

/* The rows of a tile that may be cut, at most; 0 if there is no such tile. */
int64_t
count_slot_rows(const smla_attention_params &p, int32_t most_rows)
{
    const smla_requests &reqs = p.visible.reqs;
    const bool has_starts = reqs.query_starts != NULL;
    const int64_t group = p.queries.num_heads / p.kv.num_kv_heads;
    const int64_t rows = group * (has_starts ? reqs.num_tokens : reqs.query_len);
    return !has_starts && rows > most_rows ? 0 : smla_clamp_int64(rows, 0, GROUP_ROWS);
}

/* Where the workspace has what is aligned to 16 bytes, behind the counters of claims. */
uint8_t *
find_partial_memory(const smla_workspace &workspace)
{
    return (uint8_t *)workspace.memory + smla_partial_padding(workspace.memory) +
           SMLA_RAGGED_WORKSPACE_BYTES;
}

/* The partial rows of so many CTAs, if `bytes` of workspace have room for them. */
paged_partials
find_partials(const smla_attention_params &p, int64_t bytes, int64_t num_ctas, int32_t most_rows)
{
    paged_partials partials = {};
    const int64_t slot_rows = count_slot_rows(p, most_rows);
    uint8_t *const memory = find_partial_memory(p.workspace);
    const int64_t arrivals_bytes =
        smla_count_parts(num_ctas * (int64_t)sizeof *partials.arrivals, SMLA_PARTIAL_ALIGN) *
        SMLA_PARTIAL_ALIGN;
    const int64_t states_bytes = smla_partial_state_bytes(2 * num_ctas * slot_rows);
    const int64_t values_bytes = 2 * num_ctas * slot_rows * p.kv.value_dim * (int64_t)sizeof(float);
    const int64_t front_bytes = memory - (uint8_t *)p.workspace.memory;
    if (slot_rows > 0 && bytes >= front_bytes + arrivals_bytes + states_bytes + values_bytes) {
        partials.arrivals = (unsigned long long *)memory;
        partials.states = (float *)(memory + arrivals_bytes);
        partials.values = (float *)(memory + arrivals_bytes + states_bytes);
        partials.slot_rows = (int32_t)slot_rows;
        partials.most_rows = most_rows;
    }
    return partials;
}

/* The counters, if there may be something to claim, they can count it, and the workspace has
 * room. */
unsigned long long *
find_counters(const smla_attention_params &p, int64_t most_tiles, int64_t num_ctas)
{
    uint8_t *const counters = find_partial_memory(p.workspace) - SMLA_RAGGED_WORKSPACE_BYTES;
    const int64_t bytes = p.workspace.bytes - (counters - (uint8_t *)p.workspace.memory);
    const bool has_room = p.workspace.memory != NULL && bytes >= SMLA_RAGGED_WORKSPACE_BYTES;
    return has_room && most_tiles > num_ctas && most_tiles + num_ctas <= (int64_t)COUNTER_MASK
               ? (unsigned long long *)counters
               : NULL;
}

template <int D, bool HALF>
cudaError_t
launch_paged(const smla_attention_params &p, const smla_attention_start &start)
{
    static_assert(sizeof(paged_memory<D>) <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    const int64_t num_sms = smla_cuda_find_device(p.call.stream.device_id)->num_sms;
    paged_args args = make_args(p);
    const int64_t most_blocks = args.most_keys / paged_shape<D>::KEYS + 1;
    const int64_t most_tiles =
        p.kv.num_kv_heads *
        (smla_count_parts(p.queries.num_tokens * args.group.divisor, TILE_ROWS) +
         p.visible.reqs.num_reqs);
    const bool are_units_countable = 2 * most_tiles * (TILE_COST + most_blocks) <= INT32_MAX;
    /* Tiles of both groups take half as long for a row, but only where there is one per SM. */
    const int32_t most_rows = 2 * most_tiles <= num_sms ? INT32_MAX : (int32_t)GROUP_ROWS;
    args.partials = find_partials(p, are_units_countable ? start.cut_bytes : 0, num_sms, most_rows);
    /* Where tiles may be cut, bits depend on the number of CTAs, which no size of pages changes. */
    const bool is_small = args.partials.arrivals == NULL && most_tiles < num_sms;
    const int64_t num_ctas = is_small ? most_tiles : num_sms;
    args.counters = find_counters(p, most_tiles, num_ctas);
    return smla_launch_large<attend_paged<D, HALF>>(args, num_ctas, PAGED_THREADS,
                                                    (int)sizeof(paged_memory<D>), p.call.stream);
}

template <int D>
cudaError_t
launch_type(const smla_attention_params &p, const smla_attention_start &start)
{
    return p.queries.type == SMLA_FLOAT_FP16 ? launch_paged<D, true>(p, start)
                                             : launch_paged<D, false>(p, start);
}

} /* namespace */

cudaError_t
smla_attend_sm90_paged(const smla_attention_params *params, const smla_attention_start *start)
{
    const smla_attention_params &p = *params;
    if (!are_rows_aligned(p)) {
        return SMLA_NO_KERNEL;
    }
    switch (p.kv.value_dim) {
    case 64: return launch_type<64>(p, *start);
    case 128: return launch_type<128>(p, *start);
    default: return launch_type<256>(p, *start);
    }
}

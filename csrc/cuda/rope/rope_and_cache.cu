/* rope_and_cache.cu: rotates queries to their positions, and rotates keys and writes them into the
 * cache, in one launch.
 *
 * Computes     q_out = RoPE of q, as apply_rope.cu has it; the row of a slot = kv_c and RoPE of
 *              k_pe in the cache's format, as cache_write.cu has it. k_pe is not written.
 * Shapes       q [T, H, 64] bf16 or fp32, tokens and heads any stride apart; k_pe [T, 64] and kv_c
 *              [>= S, 512] of the same type; slot_mapping [S], S <= T; the table as in
 *              apply_rope.cu
 * Shared mem   none
 * Roles        The first blocks write keys, a warp each, because a key's loads depend on each
 *              other: lane i has values 2 i and 2 i + 1 of k_pe, and with halves the lane 16 away
 *              has the other values of its pairs. A thread of the other blocks rotates 4 pairs of 4
 *              heads (rotate_heads.cuh). No barriers.
 * Roofline     Memory binds: per token 256 H bytes of bf16 queries, 1152 of its key, and its row;
 *              H 128, T 8192, fp8_ds_mla: 283 MB, 66 us at 4.3 TB/s.
 * Numerics     Every byte is that of the two operators, on every device: products and sums are
 *              rounded one by one, then once to the type of q and k_pe, then as the row's format
 *              asks. A token with a position that the table lacks is not rotated, and one with a
 *              bad slot is not written. Of tokens with one slot the last of 32 wins, as in
 *              cache_write.cu.
 * Source       vLLM's fused RoPE and cache write of MLA, for the operator.
 */
#include "cuda/cache/write_token.cuh"
#include "cuda/rope/rotate_heads.cuh"

namespace {

struct rope_and_cache_args {
    apply_args queries;
    smla_cache_write_params insert;
    smla_divisor block_size;
    row_offsets offsets;
    int64_t key_blocks;
    bool rows_are_bf16; /* else fp8_ds_mla */
};

static_assert(SMLA_QK_ROPE_HEAD_DIM == 2 * SMLA_WARP_LANES, "a lane has two values of k_pe");

__device__ __forceinline__ float
read_angle(const apply_args &args, int64_t at)
{
    const void *const table = args.p.rope.cos_sin;
    return args.p.table_type == SMLA_FLOAT_BF16 ? smla_low_bf16(__ldg((const uint16_t *)table + at))
                                                : __ldg((const float *)table + at);
}

/* Rotates a lane's two values of a token's k_pe. All lanes of the warp call it together. */
template <int TYPE>
__device__ __forceinline__ void
rotate_key(const apply_args &args, int64_t token, uint32_t *words)
{
    const int lane = lane_idx();
    const bool is_neox = args.p.is_neox;
    const int64_t position = rope_position(args.p.rope, token);
    float own[2];
    float rotated[2];
    if constexpr (TYPE == SMLA_FLOAT_FP32) {
        own[0] = smla_bits_float(words[0]);
        own[1] = smla_bits_float(words[1]);
    } else {
        own[0] = smla_low_bf16(words[0]);
        own[1] = smla_high_bf16(words[0]);
    }
    if (position < 0 || position >= args.p.rope.max_pos) {
        return; /* the whole warp: it has one token */
    }
    const int64_t row = position * args.p.rope.cos_sin_stride_pos;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float across = __shfl_xor_sync(ALL_LANES, own[i], SMLA_WARP_LANES / 2);
        const float other = is_neox ? across : own[1 - i];
        const int pair = is_neox ? (2 * lane + i) % SMLA_WARP_LANES : lane;
        const bool is_first = is_neox ? lane < SMLA_WARP_LANES / 2 : i == 0;
        const float cos = read_angle(args, row + pair);
        const float sin = read_angle(args, row + SMLA_WARP_LANES + pair);
        /* a cos - b sin for a pair's first value, b cos + a sin for its second one */
        rotated[i] = __fadd_rn(__fmul_rn(own[i], cos), __fmul_rn(other, is_first ? -sin : sin));
    }
    if constexpr (TYPE == SMLA_FLOAT_FP32) {
        words[0] = isnan(rotated[0]) ? 0x7FC00000u : smla_float_bits(rotated[0]);
        words[1] = isnan(rotated[1]) ? 0x7FC00000u : smla_float_bits(rotated[1]);
    } else {
        words[0] = smla_floats_to_bf16x2(rotated[0], rotated[1]);
    }
}

/* Writes the key of a warp's token. */
template <int TYPE, bool ALIGNED>
__device__ __forceinline__ void
insert_key(const rope_and_cache_args &args, int64_t token)
{
    const smla_cache_write_params &p = args.insert;
    given_part<TYPE> part;
    given_pointers pointers = find_token<TYPE>(p, token);
    load_next<TYPE, SMLA_ROW_BFLOAT16, ALIGNED>(p, &pointers, &part); /* a row of either format */
    const int64_t slot = find_slots(p, token, 1);
    uint8_t *const row = shuffle_pointer(find_slot_row(p.kv, args.block_size, slot).row, 0);
    rotate_key<TYPE>(args.queries, token, part.rope);
    if (row == nullptr) {
        return;
    }
    if (args.rows_are_bf16) {
        write_token<TYPE, SMLA_ROW_BFLOAT16, ALIGNED>(part, args.offsets, 1.0f, row);
    } else {
        write_token<TYPE, SMLA_ROW_FP8_DS_MLA, ALIGNED>(part, args.offsets, 1.0f, row);
    }
}

template <int TYPE, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS)
    rope_and_cache_kernel(const __grid_constant__ rope_and_cache_args args)
{
    ptx_wait_for_grids();
    const int64_t query_blocks = (args.queries.num_threads + BLOCK_THREADS - 1) / BLOCK_THREADS;
    for (int64_t block = blockIdx.x; block < args.key_blocks + query_blocks; block += gridDim.x) {
        if (block < args.key_blocks) {
            const int64_t token = block * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
            if (token < args.insert.num_tokens) {
                insert_key<TYPE, ALIGNED>(args, token);
            }
            continue;
        }
        const int64_t i = (block - args.key_blocks) * BLOCK_THREADS + threadIdx.x;
        if (i >= args.queries.num_threads) {
            continue;
        }
        if (args.queries.p.is_neox) {
            rotate_part<TYPE, true, ALIGNED>(args.queries, i);
        } else {
            rotate_part<TYPE, false, ALIGNED>(args.queries, i);
        }
    }
}

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_cuda_launch_rope_and_cache_mla(const smla_rope_and_cache_params *p, const smla_cuda_device *)
{
    rope_and_cache_args args = {};
    args.queries = make_apply_args(p->queries);
    args.insert = p->insert;
    args.block_size = smla_make_divisor(p->insert.kv.block_size);
    args.offsets = offsets_of(p->insert.kv);
    args.rows_are_bf16 = p->insert.kv.format->number == SMLA_ROW_BFLOAT16;
    args.key_blocks = smla_count_parts(p->insert.num_tokens, BLOCK_WARPS);
    const bool is_aligned = are_vectors(p->queries) && has_aligned_tokens(p->insert);
    const int64_t num_blocks =
        args.key_blocks + smla_count_parts(args.queries.num_threads, BLOCK_THREADS);
    static const smla_kernel<rope_and_cache_args> kernels[2][2] = {
        {rope_and_cache_kernel<SMLA_FLOAT_FP32, false>,
         rope_and_cache_kernel<SMLA_FLOAT_FP32, true>},
        {rope_and_cache_kernel<SMLA_FLOAT_BF16, false>,
         rope_and_cache_kernel<SMLA_FLOAT_BF16, true>},
    };
    return smla_launch(kernels[p->queries.type == SMLA_FLOAT_BF16][is_aligned], args, num_blocks,
                       BLOCK_THREADS, 0, p->call.stream);
}

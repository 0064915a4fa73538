/* cache_insert.cu: writes whole keys into the cache, quantised on the way.
 *
 * Computes     k -> bf16 -> a row of the cache's format; row_encoder.cuh has the rules
 * Shapes       k [T, 512] or [T, 128] bf16, fp16 or fp32, rows any stride apart; slot_mapping [T]
 *              int32 or int64, any stride; rows and pages as kv_format.h draws them
 * Shared mem   none
 * Roles        A warp writes a run of 1 to 4 tokens. A lane has 8 values in a row of each half of a
 *              key, or 4 of a key of 128: lanes that share a scale are neighbours. The next token's
 *              loads are in flight meanwhile. Lane i finds the row of token i. No barriers.
 * Roofline     Memory. Bytes per token: 1024 + 584 for fp8_v4, floor 0.37 ns at 4.3 TB/s
 *              (`python -m sparse_mla bench --device cuda --only bytes` measures it).
 * Numerics     Every byte is that of the CPU's write. A token whose slot is outside the cache is
 *              skipped. A token yields to a token of the same slot among the 31 after it. If two
 *              such tokens are farther apart, their row may hold parts of both.
 * Source       quantize_and_insert_k_cache and indexer_k_quant_and_cache of vLLM, for the formats.
 */
#include "cuda/cache/cache_slots.cuh"
#include "cuda/cache/row_encoder.cuh"

namespace {

/* A lane's part of a key, in the caller's type. */
template <int TYPE, int ROW> struct given_key {
    enum {
        ELEMENT_BYTES = TYPE == SMLA_FLOAT_FP32 ? 4 : 2,
        COUNT = key_part<ROW>::COUNT,
        STEPS = key_part<ROW>::STEPS,
        BYTES = COUNT * ELEMENT_BYTES, /* bytes of a lane per step */
    };
    uint32_t words[STEPS][BYTES / 4];
};

template <int TYPE, int ROW, bool ALIGNED>
__device__ __forceinline__ void
load_key(const uint8_t *from, given_key<TYPE, ROW> *key)
{
    using layout = given_key<TYPE, ROW>;
    constexpr int VECTOR = layout::BYTES < 16 ? layout::BYTES : 16;
#pragma unroll
    for (int s = 0; s < layout::STEPS; s++) {
        const uint8_t *const at = from + (s * SMLA_WARP_LANES + lane_idx()) * layout::BYTES;
#pragma unroll
        for (int i = 0; i < layout::BYTES; i += VECTOR) {
            smla_load_words<VECTOR, ALIGNED, layout::ELEMENT_BYTES>(at + i, key->words[s] + i / 4);
        }
    }
}

template <int TYPE, int ROW>
__device__ __forceinline__ void
write_key(const given_key<TYPE, ROW> &given, float inverse, uint8_t *row, uint8_t *scales)
{
    using layout = given_key<TYPE, ROW>;
    key_part<ROW> key;
#pragma unroll
    for (int s = 0; s < layout::STEPS; s++) {
        narrow<TYPE, layout::COUNT>(given.words[s], key.pairs[s]);
    }
    encode_key<ROW>(key, inverse, row, scales);
}

template <int TYPE, int ROW, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, FEW_BLOCKS_PER_SM)
    insert_kernel(const __grid_constant__ write_args args)
{
    ptx_wait_for_grids();
    const smla_cache_write_params &p = args.p;
    const int64_t stride = p.kv_c_stride_token * given_key<TYPE, ROW>::ELEMENT_BYTES;
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    const float inverse = 1.0f / smla_load_given_scale(p.kv_scale);
    int64_t run = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; run * args.run_tokens < p.num_tokens; run += num_warps) {
        const int64_t first = run * args.run_tokens;
        const int64_t left = p.num_tokens - first;
        const int num_tokens = left < args.run_tokens ? (int)left : args.run_tokens;
        /* Read every token, even one that is not written, so that its loads do not wait for the
         * slot. */
        given_key<TYPE, ROW> next;
        const uint8_t *from = (const uint8_t *)p.kv_c + first * stride;
        load_key<TYPE, ROW, ALIGNED>(from, &next);
        const int64_t slot = find_slots(p, first, num_tokens);
        const smla_kv_token target = find_slot_row(p.kv, args.block_size, slot);
        for (int i = 0; i < num_tokens; i++) {
            const given_key<TYPE, ROW> given = next;
            if (i + 1 < num_tokens) {
                from += stride;
                load_key<TYPE, ROW, ALIGNED>(from, &next);
            }
            uint8_t *const row = shuffle_pointer(target.row, i);
            uint8_t *const row_scales = shuffle_pointer(target.scales, i);
            if (row != nullptr) { /* the same condition for all lanes */
                write_key<TYPE, ROW>(given, inverse, row, row_scales);
            }
        }
    }
}

/* ---- Table --------------------------------------------------------------------------------- */

/* The kernels of a format: for bf16 in any rows and in aligned ones, for fp16, and for fp32. */
template <int ROW>
constexpr format_kernels<write_args, 4>
serve()
{
    return {(smla_kv_row_number)ROW,
            {insert_kernel<SMLA_FLOAT_BF16, ROW, false>, insert_kernel<SMLA_FLOAT_BF16, ROW, true>,
             insert_kernel<SMLA_FLOAT_FP16, ROW, false>,
             insert_kernel<SMLA_FLOAT_FP32, ROW, false>}};
}

const format_kernels<write_args, 4> insert_table[] = {
    serve<SMLA_ROW_FP8_V4>(),      serve<SMLA_ROW_FP8_E4M3>(), serve<SMLA_ROW_FP8_INDEX>(),
    serve<SMLA_ROW_MXFP4_INDEX>(), serve<SMLA_ROW_FP8_V41>(),  serve<SMLA_ROW_FP4_V41>(),
    serve<SMLA_ROW_FP8_NOPE>(),
};

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_cuda_insert_keys(const smla_cache_write_params *p)
{
    const bool is_aligned = smla_is_multiple(p->kv_c, p->kv_c_stride_token * 2, 16);
    const int choice = p->input_type == SMLA_FLOAT_BF16   ? is_aligned
                       : p->input_type == SMLA_FLOAT_FP16 ? 2
                                                          : 3;
    return launch_writes(find_kernel(insert_table, p->kv, choice), p);
}

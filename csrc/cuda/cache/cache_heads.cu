/* cache_heads.cu: writes keys and values of KV heads into pages, quantised on the way.
 *
 * Computes     copies, or e4m3(x / scale) with a scale for all heads or one per head
 * Shapes       k [T, Hk, D], v [T, Hk, Dv] bf16, fp16 or fp32; k_cache [P, ps, Hk, D], v_cache
 *              [P, ps, Hk, Dv] of the same type or bytes; all but the last dimension with any
 *              strides; D and Dv multiples of 8; slot_mapping [T] int32 or int64, any stride
 * Shared mem   none
 * Roles        A warp writes 128 units of a token's keys, or of its values: a lane has one in a row
 *              of 32, four times, so that four loads are in flight. A unit is 16 bytes of the rows.
 *              Every lane finds the slot. No barriers.
 * Roofline     Memory. Bytes per token of 8 heads, D = Dv = 128: 4096 + 4096 as bf16, 4096 + 2048
 *              as e4m3, and its slot; 8192 tokens take 15.6 and 11.7 us at 4.3 TB/s
 *              (`python -m sparse_mla bench --device cuda --only bytes` measures it).
 * Numerics     Every byte is that of the CPU's write, which divides. A token whose slot is outside
 *              the cache is skipped. A token yields to a token of the same slot among the 31 after
 *              it. If two such tokens are farther apart, their rows may hold parts of both.
 * Source       reshape_and_cache_flash of vLLM, for the arguments.
 */
#include "cuda/cache/cache_slots.cuh"
#include "cuda/projection/quant_units.cuh"

namespace {

enum {
    LANE_UNITS = 4,
    WARP_UNITS = LANE_UNITS * SMLA_WARP_LANES,
    UNIT_BYTES = 16,
    COPY_BLOCKS_PER_SM = 4,
};

struct heads_args {
    smla_reshape_params p;
    smla_divisor page_size;
    smla_divisor token_warps; /* warps that write a token: its keys first, then its values */
    smla_divisor head_units[SMLA_WRITTEN_PARTS];
    uint32_t part_units[SMLA_WRITTEN_PARTS]; /* units of all heads */
    uint32_t key_warps;
};

/* A unit: the offsets of its first element in a token's rows and in its row of the cache. */
struct head_unit {
    int64_t from;
    int64_t to;
    uint32_t head;
};

template <int COUNT>
__device__ __forceinline__ head_unit
find_unit(const smla_head_write &part, const smla_divisor &head_units, uint32_t unit)
{
    const uint32_t head = smla_divide_uint32(unit, head_units);
    const int64_t at = (int64_t)(unit - head * (uint32_t)head_units.divisor) * COUNT;
    return {head * part.stride_head + at, head * part.cache_stride_head + at, head};
}

/* smla_float_to_e4m3(x / scale) of four values. smla_quantize_x4 takes quotients up to 448; larger
 * ones become 448 here, as they would by rounding. It sets the signs. */
__device__ __forceinline__ uint32_t
quantize_any_x4(const float x[4], const smla_scale &by)
{
    const float most = SMLA_E4M3_MAX * by.scale;
    float bounded[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bounded[i] = fabsf(x[i]) > most ? most : x[i]; /* NaN stays */
    }
    return smla_quantize_x4(bounded, smla_signs_of_floats(x), by);
}

__device__ __forceinline__ float
load_head_scale(const smla_head_write &part, uint32_t head)
{
    return part.scale.pointer == nullptr
               ? part.scale.value
               : __ldg(part.scale.pointer + head * part.scale_stride_head);
}

/* Stores a unit as it is, or quantised. `to` is its first element in the cache. */
template <int TYPE, bool QUANTIZES, bool ALIGNED>
__device__ __forceinline__ void
store_unit(const smla_head_write &part, uint32_t head, const uint32_t *words, int64_t to)
{
    constexpr int ELEMENT_BYTES = TYPE == SMLA_FLOAT_FP32 ? 4 : 2;
    constexpr int COUNT = UNIT_BYTES / ELEMENT_BYTES;
    if constexpr (QUANTIZES) {
        const smla_scale by = smla_make_scale(load_head_scale(part, head));
        float x[COUNT];
        uint32_t codes[COUNT / 4];
        widen_unit<TYPE, COUNT>(words, x);
#pragma unroll
        for (int k = 0; k < COUNT / 4; k++) {
            codes[k] = quantize_any_x4(x + 4 * k, by);
        }
        smla_store_words<COUNT, ALIGNED, 1>((uint8_t *)part.cache + to, codes);
    } else {
        smla_store_words<UNIT_BYTES, ALIGNED, ELEMENT_BYTES>((uint8_t *)part.cache +
                                                                 to * ELEMENT_BYTES,
                                                             words);
    }
}

template <int TYPE, bool QUANTIZES, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, !QUANTIZES && ALIGNED ? COPY_BLOCKS_PER_SM : FEW_BLOCKS_PER_SM)
    write_heads_kernel(const __grid_constant__ heads_args args)
{
    ptx_wait_for_grids();
    constexpr int ELEMENT_BYTES = TYPE == SMLA_FLOAT_FP32 ? 4 : 2;
    constexpr int COUNT = UNIT_BYTES / ELEMENT_BYTES;
    const smla_reshape_params &p = args.p;
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    const int64_t num_works = p.slots.num_tokens * args.token_warps.divisor;
    int64_t work = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; work < num_works; work += num_warps) {
        const int64_t token = smla_divide(work, args.token_warps);
        const uint32_t number = (uint32_t)(work - token * args.token_warps.divisor);
        const int idx = number >= args.key_warps;
        const smla_head_write &part = p.parts[idx];
        const uint32_t num_units = args.part_units[idx];
        const uint32_t first = (number - (idx ? args.key_warps : 0)) * WARP_UNITS + lane_idx();
        const int64_t row = token * part.stride_token;
        /* Read every token, even one that is not written, so that its loads do not wait for the
         * slot. */
        head_unit units[LANE_UNITS];
        uint32_t words[LANE_UNITS][UNIT_BYTES / 4];
#pragma unroll
        for (int i = 0; i < LANE_UNITS; i++) {
            const uint32_t unit = first + i * SMLA_WARP_LANES;
            if (unit < num_units) {
                units[i] = find_unit<COUNT>(part, args.head_units[idx], unit);
                smla_load_words<UNIT_BYTES, ALIGNED, ELEMENT_BYTES>(
                    (const uint8_t *)part.rows + (row + units[i].from) * ELEMENT_BYTES, words[i]);
            }
        }
        const int64_t slot = __shfl_sync(ALL_LANES, find_slots(p.slots, token, 1), 0);
        if (slot < 0) {
            continue;
        }
        const int64_t page = smla_divide(slot, args.page_size);
        const int64_t to = page * part.cache_stride_page +
                           (slot - page * args.page_size.divisor) * part.cache_stride_token;
#pragma unroll
        for (int i = 0; i < LANE_UNITS; i++) {
            if (first + i * SMLA_WARP_LANES < num_units) {
                store_unit<TYPE, QUANTIZES, ALIGNED>(part, units[i].head, words[i],
                                                     to + units[i].to);
            }
        }
    }
}

/* ---- Table --------------------------------------------------------------------------------- */

struct heads_row {
    smla_float_type type;
    bool quantizes;
    void (*kernels[2])(heads_args); /* those for any rows, and for aligned ones */
};

template <int TYPE, bool QUANTIZES>
constexpr heads_row
serve(smla_float_type type)
{
    return {type,
            QUANTIZES,
            {write_heads_kernel<TYPE, QUANTIZES, false>,
             write_heads_kernel<TYPE, QUANTIZES, true>}};
}

const heads_row heads_table[] = {
    serve<SMLA_FLOAT_BF16, false>(SMLA_FLOAT_BF16), serve<SMLA_FLOAT_BF16, false>(SMLA_FLOAT_FP16),
    serve<SMLA_FLOAT_FP32, false>(SMLA_FLOAT_FP32), serve<SMLA_FLOAT_BF16, true>(SMLA_FLOAT_BF16),
    serve<SMLA_FLOAT_FP16, true>(SMLA_FLOAT_FP16),  serve<SMLA_FLOAT_FP32, true>(SMLA_FLOAT_FP32),
};

/* Whether every unit is a vector in both arrays. */
bool
is_aligned(const smla_head_write &part, int64_t element_bytes, bool quantizes)
{
    const int64_t cache_bytes = quantizes ? 1 : element_bytes;
    const int64_t unit_bytes = UNIT_BYTES / element_bytes * cache_bytes;
    return smla_are_rows_aligned(part.rows, part.stride_token, part.stride_head, UNIT_BYTES,
                                 element_bytes) &&
           smla_are_rows_aligned(part.cache, part.cache_stride_token, part.cache_stride_head,
                                 unit_bytes, cache_bytes) &&
           part.cache_stride_page * cache_bytes % unit_bytes == 0;
}

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_cuda_launch_reshape_and_cache(const smla_reshape_params *p, const smla_cuda_device *)
{
    const int64_t element_bytes = smla_float_bytes(p->input_type);
    heads_args args = {*p, smla_make_divisor(p->slots.kv.block_size)};
    int64_t warps[SMLA_WRITTEN_PARTS];
    bool are_aligned = true;
    for (int i = 0; i < SMLA_WRITTEN_PARTS; i++) {
        const smla_head_write &part = p->parts[i];
        const int64_t head_units = part.dim * element_bytes / UNIT_BYTES;
        args.head_units[i] = smla_make_divisor(head_units);
        args.part_units[i] = (uint32_t)(p->num_heads * head_units);
        warps[i] = smla_count_parts(args.part_units[i], WARP_UNITS);
        are_aligned = are_aligned && is_aligned(part, element_bytes, p->quantizes);
    }
    args.key_warps = (uint32_t)warps[0];
    args.token_warps = smla_make_divisor(warps[0] + warps[1]);
    const int64_t num_works = p->slots.num_tokens * args.token_warps.divisor;
    for (const heads_row &row : heads_table) {
        if (row.type == p->input_type && row.quantizes == p->quantizes) {
            return smla_launch(row.kernels[are_aligned], args,
                               smla_count_parts(num_works, BLOCK_WARPS), BLOCK_THREADS, 0,
                               p->call.stream);
        }
    }
    return SMLA_NO_KERNEL;
}

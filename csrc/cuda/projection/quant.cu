/* quant.cu: dynamic per-tensor quantisation to e4m3.
 *
 * Computes     scale = max(amax, 1e-10) / 448,  out = e4m3(x / scale)
 * Shapes       x, out of any rank up to 8, any strides: bf16, fp16 or fp32 -> bytes; scale, one
 *              fp32
 * Shared mem   amax: 32 bytes, the maxima of warps
 * Roles        amax: the grid fills the device once. A thread reads 16 bytes at a time, 4 loads
 *              ahead; a block's maximum goes into scale by atomicMax. quantize: a thread has 2
 *              vectors. The last blocks of x come first, because L2 still has what amax read last.
 *              Barriers (__syncthreads): maxima written.
 * Roofline     memory, x twice and out once: 5 bytes per element of bf16, 9 of fp32, 1.2 and
 *              2.1 ps at 4.3 TB/s, less what L2 (60 MB) keeps. quantize alone moves 3 and 5 bytes;
 *              in that time 132 SMs of 128 lanes at 1.75 GHz run 20 and 34 instructions; it has
 *              about 12 and 15 (sm_90a). amax and quantize reach 93 % of 4.3 TB/s on an H200, 2^28
 *              bf16 values (2026-11-20, this operator of `python -m sparse_mla bench --device cuda
 *              --only bytes`, replayed without the copy).
 * Numerics     Every byte is what the CPU gives. NaN is left out of amax, and an infinity counts as
 *              FLT_MAX. A quotient by 448 never falls when amax grows, so the largest scale is the
 *              scale of the largest value. A maximum does not depend on the order, so the bits are
 *              the same on every run. An empty x has scale 1e-10 / 448.
 * Source       dynamic_per_batched_tensor_quant of vLLM, for the formula.
 */
#include "core/quant_dims.h"
#include "cuda/host/cuda.h"
#include "cuda/projection/load_value.cuh"
#include "cuda/projection/quant_units.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    BLOCK_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    AMAX_BLOCKS_PER_SM = 4,
    AMAX_UNROLL = 4,
    QUANTIZE_UNROLL = 2,
};

/* ---- Units --------------------------------------------------------------------------------- */

/* x and out as units of COUNT elements, which are contiguous in both. The last dimension counts
 * units: sizes[last] is a number of units, and its strides lead from one unit to the next. `tail`
 * is the number of elements that a single row has beyond its last unit, fewer than COUNT. */
struct quant_args {
    const void *x;
    uint8_t *out;
    float *scale;
    int64_t num_units;
    int64_t x_strides[SMLA_MAX_RANK];
    int64_t out_strides[SMLA_MAX_RANK];
    smla_divisor sizes[SMLA_MAX_RANK];
    int32_t ndim;
    int32_t tail;
};

struct unit_offsets {
    int64_t x; /* offsets in elements */
    int64_t out;
};

__device__ __forceinline__ unit_offsets
find_unit(const quant_args &args, int64_t unit)
{
    unit_offsets offsets = {0, 0};
    for (int i = args.ndim - 1; i > 0; i--) {
        const int64_t outer = smla_divide(unit, args.sizes[i]);
        const int64_t inner = unit - outer * args.sizes[i].divisor;
        offsets.x += inner * args.x_strides[i];
        offsets.out += inner * args.out_strides[i];
        unit = outer;
    }
    return {offsets.x + unit * args.x_strides[0], offsets.out + unit * args.out_strides[0]};
}

/* ---- amax ---------------------------------------------------------------------------------- */

/* Returns the block's largest amax to its first thread. */
__device__ __forceinline__ float
max_of_block(float amax)
{
    __shared__ uint32_t warp_bits[BLOCK_WARPS];
    /* Floats >= 0 have the order of their bits. */
    const uint32_t bits = __reduce_max_sync(ALL_LANES, smla_float_bits(amax));
    if (threadIdx.x % SMLA_WARP_LANES == 0) {
        warp_bits[threadIdx.x / SMLA_WARP_LANES] = bits;
    }
    __syncthreads(); /* the warps' maxima are written */
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_WARPS; i++) {
        largest = max(largest, warp_bits[i]);
    }
    return smla_bits_float(largest);
}

/* Finds the scale of x; `scale` is 0 before the launch. */
template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS, AMAX_BLOCKS_PER_SM)
    amax_kernel(const __grid_constant__ quant_args args)
{
    ptx_wait_for_grids();
    const int64_t step = (int64_t)gridDim.x * BLOCK_THREADS;
    float amax = 0.0f;
    for (int64_t unit = (int64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x; unit < args.num_units;
         unit += step * AMAX_UNROLL) {
        unit_words<TYPE, COUNT> units[AMAX_UNROLL] = {};
#pragma unroll
        for (int i = 0; i < AMAX_UNROLL; i++) {
            if (unit + i * step < args.num_units) {
                load_unit<TYPE, COUNT>(args.x, find_unit(args, unit + i * step).x, units[i].words);
            }
        }
#pragma unroll
        for (int i = 0; i < AMAX_UNROLL; i++) {
            float values[COUNT < 4 ? 4 : COUNT];
            widen_unit<TYPE, COUNT>(units[i].words, values);
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                amax = fmaxf(amax, fabsf(values[k])); /* fmaxf ignores NaN */
            }
        }
    }
    if (blockIdx.x == 0 && (int)threadIdx.x < args.tail) {
        const float value =
            load_value(args.x, (smla_float_type)TYPE, args.num_units * COUNT + threadIdx.x);
        amax = fmaxf(amax, fabsf(value));
    }
    const float largest = max_of_block(amax);
    if (threadIdx.x == 0) {
        const float scale = fmaxf(fminf(largest, FLT_MAX), 1e-10f) / SMLA_E4M3_MAX;
        atomicMax((int *)args.scale, (int)smla_float_bits(scale));
    }
}

/* ---- quantize ------------------------------------------------------------------------------ */

template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS) quantize_kernel(const __grid_constant__ quant_args args)
{
    ptx_wait_for_grids();
    constexpr int BLOCK_UNITS = BLOCK_THREADS * QUANTIZE_UNROLL;
    const smla_scale by = smla_make_scale(*args.scale);
    const int64_t num_blocks = (args.num_units + BLOCK_UNITS - 1) / BLOCK_UNITS;
    for (int64_t block = num_blocks - 1 - blockIdx.x; block >= 0; block -= gridDim.x) {
        const int64_t first = block * BLOCK_UNITS + threadIdx.x;
        unit_offsets all_offsets[QUANTIZE_UNROLL];
        unit_words<TYPE, COUNT> units[QUANTIZE_UNROLL];
#pragma unroll
        for (int i = 0; i < QUANTIZE_UNROLL; i++) {
            if (first + i * BLOCK_THREADS < args.num_units) {
                all_offsets[i] = find_unit(args, first + i * BLOCK_THREADS);
                load_unit<TYPE, COUNT>(args.x, all_offsets[i].x, units[i].words);
            }
        }
#pragma unroll
        for (int i = 0; i < QUANTIZE_UNROLL; i++) {
            if (first + i * BLOCK_THREADS < args.num_units) {
                float values[COUNT < 4 ? 4 : COUNT];
                uint32_t bytes[COUNT < 4 ? 1 : COUNT / 4];
                widen_unit<TYPE, COUNT>(units[i].words, values);
#pragma unroll
                for (int k = 0; k < (COUNT + 3) / 4; k++) {
                    const float *const x = values + 4 * k;
                    bytes[k] = smla_quantize_x4(x, smla_signs_of_floats(x), by);
                }
                store_codes<COUNT>(args.out + all_offsets[i].out, bytes);
            }
        }
    }
    if (blockIdx.x == 0 && (int)threadIdx.x < args.tail) {
        const int64_t at = args.num_units * COUNT + threadIdx.x;
        const float value = load_value(args.x, (smla_float_type)TYPE, at);
        args.out[at] = smla_float_to_e4m3(value / by.scale);
    }
}

struct quant_row {
    smla_float_type type;
    int32_t count; /* elements per unit */
    void (*find_amax)(quant_args);
    void (*quantize)(quant_args);
};

const quant_row quant_rows[] = {
    {SMLA_FLOAT_BF16, 8, amax_kernel<SMLA_FLOAT_BF16, 8>, quantize_kernel<SMLA_FLOAT_BF16, 8>},
    {SMLA_FLOAT_BF16, 1, amax_kernel<SMLA_FLOAT_BF16, 1>, quantize_kernel<SMLA_FLOAT_BF16, 1>},
    {SMLA_FLOAT_FP16, 8, amax_kernel<SMLA_FLOAT_FP16, 8>, quantize_kernel<SMLA_FLOAT_FP16, 8>},
    {SMLA_FLOAT_FP16, 1, amax_kernel<SMLA_FLOAT_FP16, 1>, quantize_kernel<SMLA_FLOAT_FP16, 1>},
    {SMLA_FLOAT_FP32, 4, amax_kernel<SMLA_FLOAT_FP32, 4>, quantize_kernel<SMLA_FLOAT_FP32, 4>},
    {SMLA_FLOAT_FP32, 1, amax_kernel<SMLA_FLOAT_FP32, 1>, quantize_kernel<SMLA_FLOAT_FP32, 1>},
};

/* Whether units of `count` elements are contiguous, aligned, and fill every row. */
bool
has_units(const smla_quant_params *p, int32_t count)
{
    const int last = p->ndim - 1;
    const int64_t element_bytes = 16 / count;
    bool good = p->x_strides[last] == 1 && p->out_strides[last] == 1 &&
                (last == 0 || p->shape[last] % count == 0) && smla_is_multiple(p->x, 0, 16) &&
                smla_is_multiple(p->out, 0, count);
    for (int i = 0; i < last; i++) {
        good = good && p->x_strides[i] * element_bytes % 16 == 0 && p->out_strides[i] % count == 0;
    }
    return good;
}

/* Fills the kernels' arguments. smla_merge_dims has merged the dimensions of `p`, and no size is
 * 0. */
quant_args
make_quant_args(const smla_quant_params *p, int32_t count)
{
    const int last = p->ndim - 1;
    quant_args args = {};
    args.x = p->x;
    args.out = p->out;
    args.scale = p->scale;
    args.ndim = p->ndim;
    args.num_units = 1;
    for (int i = 0; i <= last; i++) {
        const int64_t units = i == last ? p->shape[i] / count : p->shape[i];
        args.num_units *= units;
        args.sizes[i] = smla_make_divisor(units > 0 ? units : 1);
        args.x_strides[i] = i == last ? p->x_strides[i] * count : p->x_strides[i];
        args.out_strides[i] = i == last ? p->out_strides[i] * count : p->out_strides[i];
    }
    args.tail = (int32_t)(p->shape[last] % count);
    return args;
}

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_cuda_launch_dynamic_per_tensor_quant(const smla_quant_params *params,
                                          const smla_cuda_device *device)
{
    quant_args args = {};
    args.scale = params->scale;
    int32_t count = 1;
    if (smla_count_elements(params) > 0) {
        const smla_quant_params p = smla_merge_dims(params);
        const int32_t vector = p.type == SMLA_FLOAT_FP32 ? 4 : 8;
        count = has_units(&p, vector) ? vector : 1;
        args = make_quant_args(&p, count);
    }
    const int64_t most_blocks = (int64_t)device->num_sms * AMAX_BLOCKS_PER_SM;
    const int64_t amax_blocks = smla_count_parts(args.num_units, BLOCK_THREADS * AMAX_UNROLL);
    const int64_t num_blocks = smla_count_parts(args.num_units, BLOCK_THREADS * QUANTIZE_UNROLL);
    const cudaError_t cleared = cudaMemsetAsync(params->scale, 0, sizeof *params->scale,
                                                (cudaStream_t)params->call.stream.handle);
    if (cleared != cudaSuccess) {
        return cleared;
    }
    const quant_row *const row = find_row(quant_rows, params->type, count);
    if (row == NULL) {
        return SMLA_NO_KERNEL;
    }
    smla_cuda_deferred deferred;
    smla_cuda_begin_deferred(&deferred);
    /* Start at least one block: it writes the scale of an empty x, and handles the tail. */
    const cudaError_t found = smla_launch(row->find_amax, args,
                                          amax_blocks < 1             ? 1
                                          : amax_blocks < most_blocks ? amax_blocks
                                                                      : most_blocks,
                                          BLOCK_THREADS, 0, params->call.stream, false, &deferred);
    return found != cudaSuccess
               ? found
               : smla_launch(row->quantize, args, num_blocks < 1 ? 1 : num_blocks, BLOCK_THREADS, 0,
                             params->call.stream, false, &deferred);
}

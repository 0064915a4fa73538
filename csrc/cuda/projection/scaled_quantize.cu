/* scaled_quantize.cu: quantisation to e4m3 with a scale per group of values.
 *
 * Computes     amax = max(max |x|, 1e-12),  out = e4m3(x * (448 / amax)),  descale = amax / 448,
 *              for every group of group_rows x group_columns values
 * Shapes       x [M, Nc] bf16, fp16 or fp32, out [M, Nc] bytes: rows contiguous, any distance
 *              apart; descale [M / group_rows, Nc / group_columns] fp32, any strides
 * Shared mem   quantize_group: the maxima of up to 16 warps, 64 bytes; quantize_columns: the maxima
 *              of a block's columns, 8 x 256 fp32, 8 KiB
 * Roles        Units are 16 bytes of x, or single elements where rows are not aligned or groups do
 *              not hold whole units. Four kernels, by the group's form:
 *              quantize_lanes    rows of at most 32 units: some lanes of a warp have a group
 *              quantize_columns  single columns: a thread has a unit's columns of every eighth row,
 *                                in one launch, or in two where few groups are cut into slabs
 *              quantize_group    other groups: a block has one
 *              find_amax, quantize_parts, set_groups: groups that are large and few are cut into
 *                                parts. A part's maximum goes into descale by atomicMax. On Hopper
 *                                scaled_quantize_sm90.cu serves those that a cluster can hold.
 *              Barriers (__syncthreads): maxima or factors are written; they are read.
 * Roofline     memory: x once and out once, 3 bytes per element of bf16, because a block reads its
 *              group again from registers or caches; large groups are read twice. [8192][7168] of
 *              bf16 on an H200 (2026-11-28), of the rate of a copy: (1, 128) 76 %, (1, -1) 73,
 *              (128, 128) 71, (-1, -1) 71 of both reads, (-1, 1) 51 of one.
 * Numerics     Every byte is what the CPU gives. NaN is left out of amax, and an infinity counts as
 *              FLT_MAX. A maximum does not depend on the order. The two divisions and the product
 *              are rounded to fp32, each once.
 * Source       The formula of vLLM's scaled_quantize, with amax / 448; the kernels are ours.
 */
#include "cuda/projection/scaled_quantize.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    PART_UNITS = 4 * BLOCK_THREADS,
    LANE_UNITS = 4,        /* units that a thread of quantize_lanes loads at a time */
    LARGE_GROUP = 1 << 15, /* elements */
    COLUMN_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    COLUMN_BLOCKS = 4, /* per SM; without a number, ptxas aims at six of 40 registers and spills */
};

/* ---- Groups in the lanes of a warp --------------------------------------------------------- */

/* Groups of one row. Units of a group are in `group_units` lanes, a power of two, so that units
 * follow each other as they do in x. */
template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS) quantize_lanes(const __grid_constant__ scaled_args args)
{
    ptx_let_next_grid_start();
    ptx_wait_for_grids();
    const smla_scaled_quantize_params &p = args.p;
    const int lanes = (int)args.group_units.divisor;
    const int64_t num_units = p.num_rows * args.row_units.divisor;
    const int64_t step = (int64_t)gridDim.x * BLOCK_THREADS * LANE_UNITS;
    /* All threads of a block go round equally often, because lanes need each other for maxima. */
    for (int64_t first = (int64_t)blockIdx.x * BLOCK_THREADS * LANE_UNITS; first < num_units;
         first += step) {
        unit_words<TYPE, COUNT> words[LANE_UNITS] = {};
        int64_t rows[LANE_UNITS], units[LANE_UNITS];
#pragma unroll
        for (int k = 0; k < LANE_UNITS; k++) {
            const int64_t i = first + k * BLOCK_THREADS + threadIdx.x;
            rows[k] = smla_divide(i, args.row_units);
            units[k] = i - rows[k] * args.row_units.divisor;
            if (i < num_units) {
                words[k] = load_at<TYPE, COUNT>(p, rows[k], units[k] * COUNT);
            }
        }
#pragma unroll
        for (int k = 0; k < LANE_UNITS; k++) {
            float amax = raise_amax<TYPE, COUNT>(0.0f, words[k]);
            for (int distance = 1; distance < lanes; distance *= 2) {
                amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, distance));
            }
            if (first + k * BLOCK_THREADS + threadIdx.x >= num_units) {
                continue;
            }
            store_by<TYPE, COUNT>(p, rows[k], units[k] * COUNT, words[k], factor_of(amax));
            if ((units[k] & (lanes - 1)) == 0) {
                store_descale(p, rows[k], smla_divide(units[k], args.group_units), amax);
            }
        }
    }
}

/* ---- A group per block --------------------------------------------------------------------- */

template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(MOST_THREADS) quantize_group(const __grid_constant__ scaled_args args)
{
    ptx_let_next_grid_start();
    ptx_wait_for_grids();
    const int step = (int)blockDim.x;
    const auto unit_of = [=](int k) { return threadIdx.x + k * step; };
    for (int64_t number = blockIdx.x; number < args.num_groups; number += gridDim.x) {
        const group_place group = find_group(args, number);
        unit_words<TYPE, COUNT> held[HELD] = {};
        float amax = load_held(args, group, unit_of, held);
#pragma unroll 4
        for (int64_t i = threadIdx.x + HELD * step; i < args.units_of_group; i += step) {
            amax = raise_amax<TYPE, COUNT>(amax, load_of_group<TYPE, COUNT>(args, group, i));
        }
        amax = max_of_block(amax);
        const float factor = factor_of(amax);
        if (threadIdx.x == 0) {
            store_descale(args.p, group.row_group, group.column_group, amax);
        }
        store_held(args, group, unit_of, held, factor);
#pragma unroll 4
        for (int64_t i = threadIdx.x + HELD * step; i < args.units_of_group; i += step) {
            store_of_group<TYPE, COUNT>(args, group, i, load_of_group<TYPE, COUNT>(args, group, i),
                                        factor);
        }
    }
}

/* ---- Groups of one column ------------------------------------------------------------------ */

/* What a launch of quantize_columns does: all, where there are enough groups to fill the device, or
 * else first the maxima, by atomicMax in descale, and then the rest. */
enum column_pass { ALL_OF_IT = 0, FIND_MAXIMA = 1, QUANTIZE = 2 };

/* A tile is a slab of a group's rows, and 32 units of columns, one per lane. A warp has every
 * eighth row. The grid has whole rows of tiles, so a block keeps its columns. */
template <int TYPE, int COUNT, int PASS>
__global__ void
__launch_bounds__(BLOCK_THREADS, COLUMN_BLOCKS)
    quantize_columns(const __grid_constant__ scaled_args args)
{
    ptx_let_next_grid_start();
    ptx_wait_for_grids();
    static_assert(COUNT <= COLUMN_WARPS, "a warp finds the factors of one column per lane");
    __shared__ float maxima[COLUMN_WARPS][COUNT][SMLA_WARP_LANES];
    const smla_scaled_quantize_params &p = args.p;
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES, lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const uint32_t first_row = smla_divide_uint32(blockIdx.x, args.column_tiles);
    const uint32_t tile = blockIdx.x - first_row * (uint32_t)args.column_tiles.divisor;
    const int64_t unit = (int64_t)tile * SMLA_WARP_LANES + lane;
    const bool exists = unit < args.row_units.divisor;
    const int64_t slab_rows = (p.group_rows + args.slabs.divisor - 1) / args.slabs.divisor;
    const int64_t num_rows = p.num_row_groups * args.slabs.divisor;
    for (int64_t row = first_row; row < num_rows; row += args.row_step) {
        /* With several slabs there are few rows. */
        const int64_t row_group =
            args.slabs.divisor == 1 ? row : smla_divide_uint32((uint32_t)row, args.slabs);
        const int64_t slab = row - row_group * args.slabs.divisor;
        const int64_t begin = row_group * p.group_rows + slab * slab_rows;
        const int64_t end = exists ? min(begin + slab_rows, (row_group + 1) * p.group_rows) : begin;
        float amax[COUNT] = {};
        if constexpr (PASS != QUANTIZE) {
#pragma unroll 4
            for (int64_t i = begin + warp; i < end; i += COLUMN_WARPS) {
                float values[COUNT < 4 ? 4 : COUNT];
                widen_unit<TYPE, COUNT>(load_at<TYPE, COUNT>(p, i, unit * COUNT).words, values);
#pragma unroll
                for (int k = 0; k < COUNT; k++) {
                    amax[k] = fmaxf(amax[k], fabsf(values[k]));
                }
            }
        }
        __syncthreads(); /* the last tile's factors are read */
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            maxima[warp][k][lane] = amax[k];
        }
        __syncthreads(); /* this tile's maxima are written */
        if (warp < COUNT && exists) {
            float *const descale = descale_of(p, row_group, unit * COUNT + warp);
            float largest = PASS == QUANTIZE ? *descale : 0.0f;
#pragma unroll
            for (int k = 0; k < COLUMN_WARPS; k++) {
                largest = fmaxf(largest, maxima[k][warp][lane]);
            }
            if constexpr (PASS == FIND_MAXIMA) {
                atomicMax((int *)descale, (int)smla_float_bits(largest));
            } else {
                maxima[0][warp][lane] = factor_of(largest); /* only this thread reads the column */
            }
            if constexpr (PASS == ALL_OF_IT) {
                store_descale(p, row_group, unit * COUNT + warp, largest);
            }
        }
        if constexpr (PASS != FIND_MAXIMA) {
            __syncthreads(); /* this tile's factors are written */
            float factors[COUNT];
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                factors[k] = maxima[0][k][lane];
            }
#pragma unroll 4
            for (int64_t i = begin + warp; i < end; i += COLUMN_WARPS) {
                store_at<TYPE, COUNT>(p, i, unit * COUNT, load_at<TYPE, COUNT>(p, i, unit * COUNT),
                                      factors);
            }
        }
    }
}

/* ---- Large groups, in parts ---------------------------------------------------------------- */

/* Before the maxima, descale = 0; once no part needs them any more, descale = amax / 448. */
template <bool IS_END>
__global__ void
__launch_bounds__(BLOCK_THREADS) set_groups(const __grid_constant__ scaled_args args)
{
    if constexpr (IS_END) {
        ptx_let_next_grid_start();
    }
    ptx_wait_for_grids();
    for (int64_t number = (int64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x;
         number < args.num_groups; number += (int64_t)gridDim.x * BLOCK_THREADS) {
        const group_place group = find_group(args, number);
        float *const descale = descale_of(args.p, group.row_group, group.column_group);
        if constexpr (IS_END) {
            store_descale(args.p, group.row_group, group.column_group, *descale);
        } else {
            *descale = 0.0f;
        }
    }
}

/* A part's group and its units. */
struct group_part {
    group_place group;
    int64_t first;
    int64_t end;
};

__device__ __forceinline__ group_part
find_part(const scaled_args &args, int64_t number)
{
    const int64_t group = smla_divide(number, args.parts);
    const int64_t first = (number - group * args.parts.divisor) * PART_UNITS;
    return group_part{find_group(args, group), first, min(first + PART_UNITS, args.units_of_group)};
}

/* descale = the group's amax. */
template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS) find_amax(const __grid_constant__ scaled_args args)
{
    ptx_wait_for_grids();
    const int64_t num_parts = args.num_groups * args.parts.divisor;
    for (int64_t number = blockIdx.x; number < num_parts; number += gridDim.x) {
        const group_part part = find_part(args, number);
        float amax = 0.0f;
#pragma unroll 4
        for (int64_t i = part.first + threadIdx.x; i < part.end; i += BLOCK_THREADS) {
            amax = raise_amax<TYPE, COUNT>(amax, load_of_group<TYPE, COUNT>(args, part.group, i));
        }
        amax = max_of_block(amax);
        if (threadIdx.x == 0) {
            atomicMax((int *)descale_of(args.p, part.group.row_group, part.group.column_group),
                      (int)smla_float_bits(amax));
        }
    }
}

template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS) quantize_parts(const __grid_constant__ scaled_args args)
{
    ptx_wait_for_grids();
    const int64_t num_parts = args.num_groups * args.parts.divisor;
    /* The last parts come first, because L2 still has what find_amax read last. */
    for (int64_t number = num_parts - 1 - blockIdx.x; number >= 0; number -= gridDim.x) {
        const group_part part = find_part(args, number);
        const float factor =
            factor_of(*descale_of(args.p, part.group.row_group, part.group.column_group));
#pragma unroll 4
        for (int64_t i = part.first + threadIdx.x; i < part.end; i += BLOCK_THREADS) {
            store_of_group<TYPE, COUNT>(args, part.group, i,
                                        load_of_group<TYPE, COUNT>(args, part.group, i), factor);
        }
    }
}

/* ---- The table ----------------------------------------------------------------------------- */

typedef void (*scaled_kernel)(scaled_args);

struct scaled_row {
    smla_float_type type;
    int32_t count; /* elements per unit */
    scaled_kernel lanes;
    scaled_kernel columns[3]; /* one per column_pass */
    scaled_kernel group;
    scaled_kernel amax;
    scaled_kernel parts;
};

template <int TYPE, int COUNT>
constexpr scaled_row
make_row(void)
{
    return scaled_row{(smla_float_type)TYPE,
                      COUNT,
                      quantize_lanes<TYPE, COUNT>,
                      {quantize_columns<TYPE, COUNT, ALL_OF_IT>,
                       quantize_columns<TYPE, COUNT, FIND_MAXIMA>,
                       quantize_columns<TYPE, COUNT, QUANTIZE>},
                      quantize_group<TYPE, COUNT>,
                      find_amax<TYPE, COUNT>,
                      quantize_parts<TYPE, COUNT>};
}

const scaled_row scaled_rows[] = {
    make_row<SMLA_FLOAT_BF16, 8>(), make_row<SMLA_FLOAT_BF16, 1>(), make_row<SMLA_FLOAT_FP16, 8>(),
    make_row<SMLA_FLOAT_FP16, 1>(), make_row<SMLA_FLOAT_FP32, 4>(), make_row<SMLA_FLOAT_FP32, 1>(),
};

/* Whether units of `count` elements are aligned and fill the groups' rows. Groups of one column are
 * fine, too: their kernel has a scale per column. */
bool
has_units(const smla_scaled_quantize_params *p, int32_t count)
{
    const int64_t element_bytes = 16 / count;
    const int64_t columns = p->group_columns == 1 ? p->num_columns : p->group_columns;
    return columns % count == 0 && smla_is_multiple(p->x, p->x_stride_row * element_bytes, 16) &&
           smla_is_multiple(p->out, p->out_stride_row, count);
}

/* Into how many slabs quantize_columns cuts the rows of a group, to give every SM some blocks. */
int64_t
count_slabs(const smla_scaled_quantize_params *p, int64_t tiles, int64_t num_sms)
{
    enum { LEAST_ROWS = 64, BLOCKS_PER_SM = 4 };
    const int64_t blocks = tiles * p->num_row_groups;
    if (blocks < 1 || blocks >= num_sms || p->group_rows < 2 * LEAST_ROWS) {
        return 1;
    }
    const int64_t wanted = BLOCKS_PER_SM * num_sms / blocks;
    const int64_t most = p->group_rows / LEAST_ROWS;
    return wanted < most ? wanted : most;
}

scaled_args
make_args(const smla_scaled_quantize_params *p, int32_t count, int64_t num_sms)
{
    /* An axis without values has a group without any. */
    const int64_t group_units = p->num_columns == 0 ? 0 : p->group_columns / count;
    const int64_t row_units = p->num_columns / count;
    const int64_t units = p->num_rows == 0 ? 0 : p->group_rows * group_units;
    const int64_t tiles = row_units > 0 ? smla_count_parts(row_units, SMLA_WARP_LANES) : 1;
    const int64_t slabs = count_slabs(p, tiles, num_sms);
    const int64_t num_rows = p->num_row_groups * slabs;
    const int64_t most_rows = INT32_MAX / tiles; /* rows in a grid, which are whole */
    const auto divisor = [](int64_t size) { return smla_make_divisor(size > 0 ? size : 1); };
    return scaled_args{*p,
                       divisor(p->num_column_groups),
                       divisor(group_units),
                       divisor(row_units),
                       divisor(smla_count_parts(units, PART_UNITS)),
                       divisor(tiles),
                       divisor(slabs),
                       num_rows < most_rows ? num_rows : most_rows,
                       p->num_row_groups * p->num_column_groups,
                       units};
}

/* ---- Launchers ----------------------------------------------------------------------------- */

/* Groups that several blocks share: maxima, then the rest, between set_groups and set_groups. */
cudaError_t
launch_shared(scaled_kernel maxima, scaled_kernel rest, const scaled_args &args, int64_t num_blocks)
{
    const smla_stream stream = args.p.call.stream;
    const int64_t few = smla_count_parts(args.num_groups, BLOCK_THREADS);
    const struct {
        scaled_kernel kernel;
        int64_t num_blocks;
    } launches[] = {{set_groups<false>, few},
                    {maxima, num_blocks},
                    {rest, num_blocks},
                    {set_groups<true>, few}};
    cudaError_t code = cudaSuccess;
    for (int i = 0; code == cudaSuccess && i < 4; i++) {
        code =
            smla_launch(launches[i].kernel, args, launches[i].num_blocks, BLOCK_THREADS, 0, stream);
    }
    return code;
}

cudaError_t
launch_columns(const scaled_row &row, const scaled_args &args)
{
    const int64_t num_blocks = args.row_step * args.column_tiles.divisor;
    return args.slabs.divisor == 1
               ? smla_launch(row.columns[ALL_OF_IT], args, num_blocks, BLOCK_THREADS, 0,
                             args.p.call.stream)
               : launch_shared(row.columns[FIND_MAXIMA], row.columns[QUANTIZE], args, num_blocks);
}

/* Threads of a block that has a group: whole warps, with up to HELD units per thread if there are
 * more units than a usual block has threads. */
int
count_threads(int64_t units)
{
    const int64_t usual = BLOCK_THREADS, most = MOST_THREADS;
    const int64_t few = units < usual ? units : usual;
    const int64_t wanted = units / HELD > few ? units / HELD : few;
    const int64_t threads = smla_count_parts(wanted, SMLA_WARP_LANES) * SMLA_WARP_LANES;
    return threads < 1 ? (int)SMLA_WARP_LANES : (int)(threads < most ? threads : most);
}

bool
is_power_of_two(int64_t n)
{
    return n > 0 && (n & (n - 1)) == 0;
}

} /* namespace */

cudaError_t
smla_cuda_launch_scaled_quantize(const smla_scaled_quantize_params *p,
                                 const smla_cuda_device *device)
{
    const int32_t vector = p->type == SMLA_FLOAT_FP32 ? 4 : 8;
    const scaled_row *const row = find_row(scaled_rows, p->type, has_units(p, vector) ? vector : 1);
    const smla_stream stream = p->call.stream;
    if (row == NULL) {
        return SMLA_NO_KERNEL;
    }
    const scaled_args args = make_args(p, row->count, device->num_sms);
    if (p->group_columns == 1 && p->num_columns > 0 && p->num_rows > 0) {
        return launch_columns(*row, args);
    }
    const int64_t lanes = args.group_units.divisor;
    if (p->group_rows == 1 && args.units_of_group > 0 && is_power_of_two(lanes) &&
        lanes <= SMLA_WARP_LANES) {
        return smla_launch(row->lanes, args,
                           smla_count_parts(p->num_rows * args.row_units.divisor,
                                            BLOCK_THREADS * LANE_UNITS),
                           BLOCK_THREADS, 0, stream);
    }
    const bool is_large = args.units_of_group * row->count >= LARGE_GROUP;
    if (is_large && args.num_groups < device->num_sms) {
        if (smla_cuda_is_hopper(device) && row->count > 1 && args.units_of_group <= CLUSTER_UNITS) {
            return smla_cuda_launch_scaled_quantize_sm90(&args);
        }
        return launch_shared(row->amax, row->parts, args, args.num_groups * args.parts.divisor);
    }
    return smla_launch(row->group, args, args.num_groups, count_threads(args.units_of_group), 0,
                       stream);
}

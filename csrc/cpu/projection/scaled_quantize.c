/* scaled_quantize.c: quantisation to e4m3 with a scale per group of values, byte-exact.
 *
 *   amax = max(max |x|, 1e-12),  out = satE4M3(x * (448 / amax)),  descale = amax / 448
 *
 * amax ignores NaN and takes an infinity as FLT_MAX. The arrays are cut into tiles: the rows of a
 * row of groups, and as many columns as several groups have. A tile is read twice, and the second
 * time it is in a cache. Wide groups find their amax by rows, and narrow ones by columns, which are
 * the lanes of vectors. A few large groups have their pieces shared out to threads instead.
 * cache_kernel.c computes.
 */
#include <string.h>

#include "core/fp_mode.h"
#include "core/interrupt.h"
#include "core/params_projection.h"
#include "core/quant_dims.h"
#include "cpu/cache/cache.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"
#include "cpu/projection/copy_rows.h"

enum {
    NARROW = SMLA_NARROW_COLUMNS, /* a group of fewer columns is narrow */
    TILE_COLUMNS = 4096,          /* columns of a tile of wide groups, unless one group has more */
    NARROW_COLUMNS = 512,
    GROUP_SPACE = NARROW_COLUMNS + SMLA_NARROW_COLUMNS, /* floats */
    PIECE = 4096,           /* elements of a large group that a thread takes at a time */
    LEAST_SHARED = 1 << 14, /* elements that are worth several threads */
};

/* Columns of some groups, in the rows of a row of groups. */
typedef struct group_tile {
    int64_t row;
    int64_t num_rows;
    int64_t first_group; /* along the columns */
    int64_t num_groups;
} group_tile;

typedef struct group_plan {
    int64_t tile_groups;
    int64_t tiles_per_row; /* tiles per row of groups */
    int64_t num_tiles;
} group_plan;

static int64_t
smaller_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static bool
is_narrow(const smla_scaled_quantize_params *p)
{
    return p->group_columns < NARROW;
}

static group_plan
plan_tiles(const smla_scaled_quantize_params *p, bool are_large)
{
    /* Tiles of many rows have fewer columns, to stay in the cache. */
    const int64_t most =
        is_narrow(p) ? NARROW_COLUMNS / smaller_of(p->group_rows, 2) : TILE_COLUMNS;
    const int64_t groups = most / p->group_columns;
    group_plan plan = {.tile_groups = are_large || groups < 1 ? 1 : groups};
    plan.tiles_per_row = (p->num_column_groups + plan.tile_groups - 1) / plan.tile_groups;
    plan.num_tiles = p->num_row_groups * plan.tiles_per_row;
    return plan;
}

static group_tile
find_tile(const smla_scaled_quantize_params *p, const group_plan *plan, int64_t index)
{
    const int64_t row = index / plan->tiles_per_row * p->group_rows;
    const int64_t first = index % plan->tiles_per_row * plan->tile_groups;
    return (group_tile){
        .row = row,
        .num_rows = smaller_of(p->group_rows, p->num_rows - row),
        .first_group = first,
        .num_groups = smaller_of(plan->tile_groups, p->num_column_groups - first),
    };
}

/* Columns of the tile, or of one of its groups. An axis without values has a group without any. */
static int64_t
count_columns(const smla_scaled_quantize_params *p, int64_t num_groups)
{
    return p->num_columns == 0 ? 0 : num_groups * p->group_columns;
}

static float *
descale_of(const smla_scaled_quantize_params *p, const group_tile *tile, int64_t group)
{
    return p->descale + tile->row / p->group_rows * p->descale_stride_row +
           (tile->first_group + group) * p->descale_stride_column;
}

/* Writes the descale of a group, and returns its factor. */
static float
finish_group(float amax, float *descale)
{
    const float finite = smla_finite_abs(amax);
    const float used = finite > SMLA_SCALED_QUANTIZE_FLOOR ? finite : SMLA_SCALED_QUANTIZE_FLOOR;
    *descale = used / SMLA_E4M3_MAX;
    return SMLA_E4M3_MAX / used;
}

/* ---- Tiles --------------------------------------------------------------------------------- */

static void
quantize_wide(const smla_cache_isa *cache, const smla_scaled_quantize_params *p,
              const group_tile *tile)
{
    const int64_t count = count_columns(p, 1);
    for (int64_t group = 0; group < tile->num_groups; group++) {
        const int64_t column = (tile->first_group + group) * p->group_columns;
        float amax = 0.0f;
        for (int64_t i = 0; i < tile->num_rows; i++) {
            const int64_t at = (tile->row + i) * p->x_stride_row + column;
            const float found = cache->find_amax(p->x, p->type, at, count);
            amax = found > amax ? found : amax;
        }
        const float factor = finish_group(amax, descale_of(p, tile, group));
        for (int64_t i = 0; i < tile->num_rows; i++) {
            const int64_t row = tile->row + i;
            cache->multiply(p->x, p->type, row * p->x_stride_row + column, count, factor,
                            p->out + row * p->out_stride_row + column);
        }
    }
}

static void
quantize_narrow(const smla_cache_isa *cache, const smla_scaled_quantize_params *p,
                const group_tile *tile)
{
    float amax[GROUP_SPACE];
    float factors[GROUP_SPACE];
    float descales[GROUP_SPACE];
    const int64_t width = p->group_columns;
    const int64_t first = tile->first_group * width;
    const int64_t count = count_columns(p, tile->num_groups);
    memset(amax, 0, (size_t)(tile->num_groups * width + SMLA_NARROW_COLUMNS) * sizeof *amax);
    for (int64_t i = 0; i < tile->num_rows; i++) {
        cache->raise_columns(p->x, p->type, (tile->row + i) * p->x_stride_row + first, count, amax);
    }
    cache->finish_groups(amax, tile->num_groups, width, factors, descales);
    float *const own = descale_of(p, tile, 0);
    if (p->descale_stride_column == 1) {
        memcpy(own, descales, (size_t)tile->num_groups * sizeof *own);
    } else {
        for (int64_t group = 0; group < tile->num_groups; group++) {
            own[group * p->descale_stride_column] = descales[group];
        }
    }
    for (int64_t i = 0; i < tile->num_rows; i++) {
        const int64_t row = tile->row + i;
        cache->multiply_columns(p->x, p->type, row * p->x_stride_row + first, count, factors,
                                p->out + row * p->out_stride_row + first);
    }
}

static void
quantize_tile(const smla_cache_isa *cache, const smla_scaled_quantize_params *p,
              const group_tile *tile)
{
    if (is_narrow(p)) {
        quantize_narrow(cache, p, tile);
    } else {
        quantize_wide(cache, p, tile);
    }
}

/* ---- Short rows ---------------------------------------------------------------------------- */

/* Whether a tile has a single row that is short, and rows are apart. */
static bool
are_rows_short(const smla_scaled_quantize_params *p)
{
    return is_narrow(p) && p->group_rows == 1 && p->num_rows > 1 && p->num_columns > 0 &&
           p->num_columns <= NARROW_COLUMNS / 2;
}

/* Quantises copies of some rows as one row of a tile. */
static void
quantize_copies(const smla_cache_isa *cache, const smla_scaled_quantize_params *p, int64_t row,
                int64_t num_rows)
{
    uint32_t x[NARROW_COLUMNS];
    uint8_t out[NARROW_COLUMNS];
    float descales[NARROW_COLUMNS];
    const int64_t size = p->type == SMLA_FLOAT_FP32 ? 4 : 2;
    const int64_t row_groups = p->num_column_groups;
    const int64_t row_bytes = p->num_columns * size;
    smla_scaled_quantize_params joined = *p;
    joined.x = x;
    joined.out = out;
    joined.descale = descales;
    joined.descale_stride_column = 1;
    joined.num_columns = num_rows * p->num_columns;
    const group_tile tile = {.num_rows = 1, .num_groups = num_rows * row_groups};
    copy_rows((const uint8_t *)p->x + row * p->x_stride_row * size, p->x_stride_row * size, x,
              row_bytes, row_bytes, num_rows);
    quantize_narrow(cache, &joined, &tile);
    copy_rows(out, p->num_columns, p->out + row * p->out_stride_row, p->out_stride_row,
              p->num_columns, num_rows);
    for (int64_t i = 0; i < num_rows; i++) {
        float *const own = p->descale + (row + i) * p->descale_stride_row;
        for (int64_t group = 0; group < row_groups; group++) {
            own[group * p->descale_stride_column] = descales[i * row_groups + group];
        }
    }
}

/* ---- Large groups -------------------------------------------------------------------------- */

/* Piece `index` of the rows of a tile of one group. */
typedef struct group_piece {
    int64_t row;
    int64_t column;
    int64_t count;
} group_piece;

static group_piece
find_piece(const smla_scaled_quantize_params *p, const group_tile *tile, int64_t pieces_per_row,
           int64_t index)
{
    const int64_t start = index % pieces_per_row * PIECE;
    return (group_piece){
        .row = tile->row + index / pieces_per_row,
        .column = tile->first_group * p->group_columns + start,
        .count = smaller_of(PIECE, p->group_columns - start),
    };
}

/* A maximum does not depend on the order it is taken in. */
static void
quantize_shared(const smla_cache_isa *cache, const smla_scaled_quantize_params *p,
                const group_tile *tile)
{
    const int64_t pieces_per_row = (p->group_columns + PIECE - 1) / PIECE;
    const int64_t num_pieces = tile->num_rows * pieces_per_row;
    float amax = 0.0f;
#pragma omp parallel for schedule(static) reduction(max : amax)
    for (int64_t i = 0; i < num_pieces; i++) {
        const group_piece piece = find_piece(p, tile, pieces_per_row, i);
        const float found =
            cache->find_amax(p->x, p->type, piece.row * p->x_stride_row + piece.column,
                             piece.count);
        amax = found > amax ? found : amax;
    }
    const float factor = finish_group(amax, descale_of(p, tile, 0));
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_pieces; i++) {
        const group_piece piece = find_piece(p, tile, pieces_per_row, i);
        cache->multiply(p->x, p->type, piece.row * p->x_stride_row + piece.column, piece.count,
                        factor, p->out + piece.row * p->out_stride_row + piece.column);
    }
}

/* Whether threads have too few groups to take one each. */
static bool
are_groups_large(const smla_scaled_quantize_params *p)
{
    return !is_narrow(p) && p->num_columns > 0 &&
           p->group_rows * p->group_columns >= LEAST_SHARED &&
           p->num_row_groups * p->num_column_groups < smla_max_threads();
}

/* ---- The operator -------------------------------------------------------------------------- */

/* A column without gaps is a row. Rows of narrow groups are one long row, if they follow each other
 * without a gap. */
static smla_scaled_quantize_params
join_rows(const smla_scaled_quantize_params *params)
{
    smla_scaled_quantize_params p = *params;
    if (p.num_columns == 1 && p.num_rows > 1 && p.x_stride_row == 1 && p.out_stride_row == 1) {
        p.num_columns = p.num_rows;
        p.group_columns = p.group_rows;
        p.num_column_groups = p.num_row_groups;
        p.descale_stride_column = p.descale_stride_row;
        p.num_rows = p.group_rows = p.num_row_groups = 1;
    }
    const bool has_one_group = p.num_column_groups == 1;
    if (is_narrow(&p) && p.group_rows == 1 && p.num_rows > 1 && p.num_columns > 0 &&
        p.x_stride_row == p.num_columns && p.out_stride_row == p.num_columns &&
        (has_one_group ||
         smla_dim_continues(p.descale_stride_row, p.descale_stride_column, p.num_column_groups))) {
        p.descale_stride_column = has_one_group ? p.descale_stride_row : p.descale_stride_column;
        p.num_columns *= p.num_rows;
        p.num_column_groups *= p.num_rows;
        p.num_rows = p.num_row_groups = 1;
    }
    return p;
}

smla_status
smla_cpu_scaled_quantize(const smla_scaled_quantize_params *params, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    const smla_scaled_quantize_params joined = join_rows(params), *const p = &joined;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    const bool are_large = are_groups_large(p), are_short = are_rows_short(p);
    const group_plan plan = plan_tiles(p, are_large);
    const int64_t copied = are_short ? NARROW_COLUMNS / p->num_columns : 1; /* rows */
    const int64_t num_tiles = are_short ? (p->num_rows + copied - 1) / copied : plan.num_tiles;
    smla_interrupt *const interrupt = smla_find_interrupt();
    /* A factor is at most 448e12, so a subnormal value is far below half of the smallest code. */
    const smla_fp_mode before = smla_fp_change(SMLA_FP_FLUSH);
    if (are_large) {
        for (int64_t i = 0; i < num_tiles && !smla_is_ended(interrupt); i++) {
            const group_tile tile = find_tile(p, &plan, i);
            quantize_shared(isa->cache, p, &tile);
        }
    } else {
#pragma omp parallel for schedule(static) if (p->num_rows * p->num_columns >= LEAST_SHARED)
        for (int64_t i = 0; i < num_tiles; i++) {
            if (smla_is_ended(interrupt)) {
                continue;
            }
            if (are_short) {
                quantize_copies(isa->cache, p, i * copied,
                                smaller_of(copied, p->num_rows - i * copied));
            } else {
                const group_tile tile = find_tile(p, &plan, i);
                quantize_tile(isa->cache, p, &tile);
            }
        }
    }
    smla_fp_change(before);
    return smla_check_ended(p->call.op, interrupt, error);
}

smla_status
smla_cpu_fp8_linear(const smla_fp8_linear_params *params, smla_error *error)
{
    SMLA_TRY(smla_cpu_scaled_quantize(&params->quantize, error));
    return smla_cpu_projection(&params->project, error);
}

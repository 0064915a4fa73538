/* mha.c: cuts multi-head attention into tiles, which mha_kernel.c computes. Requests whose keys are
 * cut into parts are left to mha_parts.c. The keys of all others are not split, and one thread
 * computes a tile, so the number of threads changes no result.
 */
#include "cpu/attention/mha.h"
#include "cpu/isa.h"

/* Tiles of one KV head of a request, if a tile has so many rows. */
static int64_t
count_tiles(const smla_attention_params *params, int64_t req, int64_t tile_rows)
{
    if (smla_count_mha_parts(params, req) > 1) {
        return 0;
    }
    const int64_t group = smla_mha_group(params);
    const int64_t rows = smla_find_request(params, req).num_queries * group;
    return (rows + tile_rows - 1) / tile_rows;
}

/* Tasks, if no requests share tiles: the tiles of all requests and KV heads. */
static int64_t
count_tasks(const smla_attention_params *params, int64_t tile_rows)
{
    int64_t count = 0;
    for (int64_t req = 0; req < params->visible.reqs.num_reqs; req++) {
        count += count_tiles(params, req, tile_rows);
    }
    return count * params->kv.num_kv_heads;
}

/* How a call is cut. */
typedef struct tile_cut {
    int tile_rows;
    int64_t num_tasks;
    int64_t *before; /* [B + 1]: the tiles, of one KV head, of the requests before one. A request
                      * that shares the tile of an earlier one has none. */
} tile_cut;

/* The more rows a tile has, the less often keys are read, unless threads would have no work. */
static tile_cut
choose_cut(const smla_attention_params *params)
{
    enum { TILES_PER_THREAD = 4 };
    const int64_t num_tasks = count_tasks(params, SMLA_MHA_ROWS);
    if (num_tasks >= TILES_PER_THREAD * (int64_t)smla_max_threads()) {
        return (tile_cut){.tile_rows = SMLA_MHA_ROWS, .num_tasks = num_tasks};
    }
    const int half = SMLA_MHA_ROWS / 2;
    return (tile_cut){.tile_rows = half, .num_tasks = count_tasks(params, half)};
}

/* Whether an array of scales, if there is one, is the same for two requests. */
static bool
have_same_scale(const smla_attention_params *params, const smla_descale *scale, int64_t a,
                int64_t b)
{
    for (int64_t head = 0; head < params->kv.num_kv_heads && scale->pointer != NULL; head++) {
        if (smla_read_mha_scale(scale, a, head) != smla_read_mha_scale(scale, b, head)) {
            return false;
        }
    }
    return true;
}

/* The requests that share a tile so far. */
typedef struct shared_tile {
    int64_t req; /* the first one */
    int64_t num_rows;
    int64_t num_lanes; /* rows that see several keys or none */
    int64_t num_keys;
} shared_tile;

/* The rows of a request that need a lane. */
static int64_t
count_lanes(const smla_attention_params *params, const smla_kv_request *of)
{
    int64_t count = 0;
    for (int64_t query = 0; query < of->num_queries; query++) {
        count += !smla_is_one_key(smla_find_mha_range(params, of, query));
    }
    return count * smla_mha_group(params);
}

/* Whether a request's rows find room in the tile. If not, a tile begins with it. One with several
 * parts ends the tile, and has none here. */
static bool
share_tile(const smla_attention_params *params, int64_t req, int lanes, shared_tile *tile)
{
    if (smla_count_mha_parts(params, req) > 1) {
        *tile = (shared_tile){0};
        return true;
    }
    const smla_kv_request of = smla_find_request(params, req);
    const int64_t num_rows = of.num_queries * smla_mha_group(params);
    const int64_t first_key = smla_place_mha_keys(tile->num_keys, of.num_keys);
    if (num_rows == 0) {
        return true;
    }
    const bool is_small = num_rows <= 2 * (int64_t)lanes;
    const int64_t num_lanes = is_small ? count_lanes(params, &of) : num_rows;
    if (tile->num_rows > 0 && tile->num_rows + num_rows <= 2 * (int64_t)lanes &&
        tile->num_lanes + num_lanes <= lanes && first_key + of.num_keys <= SMLA_MHA_SHARED_KEYS &&
        have_same_scale(params, &params->logits.q_descale, tile->req, req) &&
        have_same_scale(params, &params->logits.k_descale, tile->req, req) &&
        have_same_scale(params, &params->logits.v_descale, tile->req, req)) {
        tile->num_rows += num_rows;
        tile->num_lanes += num_lanes;
        tile->num_keys = first_key + of.num_keys;
        return true;
    }
    *tile = (shared_tile){req, num_rows, num_lanes, of.num_keys};
    return false;
}

static void
add_tiles(const smla_attention_params *params, int lanes, tile_cut *cut)
{
    shared_tile tile = {0};
    cut->before[0] = 0;
    for (int64_t req = 0; req < params->visible.reqs.num_reqs; req++) {
        const bool is_shared = share_tile(params, req, lanes, &tile);
        cut->before[req + 1] =
            cut->before[req] + (is_shared ? 0 : count_tiles(params, req, cut->tile_rows));
    }
    cut->num_tasks = cut->before[params->visible.reqs.num_reqs] * params->kv.num_kv_heads;
}

/* The first request with a tile from number `tile` on; B if there is none. */
static int64_t
find_owner(const smla_attention_params *params, const tile_cut *cut, int64_t tile)
{
    int64_t req = 0;
    for (int64_t past = params->visible.reqs.num_reqs; req < past;) {
        const int64_t middle = (req + past) / 2;
        if (cut->before[middle + 1] > tile) {
            past = middle;
        } else {
            req = middle + 1;
        }
    }
    return req;
}

/* The tile of a task. Tiles of a request and a KV head follow each other, because they read the
 * same keys. The last ones of a head, which see the most keys, come first. */
static smla_mha_tile
find_tile(const smla_attention_params *params, const tile_cut *cut, int64_t task)
{
    const int64_t req = find_owner(params, cut, task / params->kv.num_kv_heads);
    const int64_t first_tile = cut->before[req];
    const int64_t num_tiles = cut->before[req + 1] - first_tile;
    const int64_t number = task - first_tile * params->kv.num_kv_heads;
    const int64_t row = (num_tiles - 1 - number % num_tiles) * cut->tile_rows;
    int64_t past = find_owner(params, cut, first_tile + num_tiles);
    while (smla_count_mha_parts(params, past - 1) > 1) {
        past--;
    }
    const smla_kv_request first = smla_find_request(params, req);
    const smla_kv_request last = smla_find_request(params, past - 1);
    const int64_t num_queries = last.first_query + last.num_queries - first.first_query;
    const int64_t left = num_queries * smla_mha_group(params) - row;
    return (smla_mha_tile){
        .req = req,
        .num_reqs = past - req,
        .kv_head = number / num_tiles,
        .row = row,
        .num_rows = left < cut->tile_rows ? (int)left : cut->tile_rows,
        .keys = {0, INT64_MAX},
    };
}

static void
run_tile(const smla_attention_work *work, int64_t task)
{
    const smla_mha_tile tile = find_tile(work->params, work->cut, task);
    work->isa->mha->run_tile(work->params, &tile, smla_own_scratch(work->scratch));
}

/* Runs the requests that are not cut into parts. */
static smla_status
attend_whole(smla_attention_work *work, tile_cut *cut, smla_error *error)
{
    add_tiles(work->params, work->isa->mha->lanes, cut);
    work->cut = cut;
    const smla_attention_loop tiles = {cut->num_tasks, smla_count_threads(cut->num_tasks),
                                       run_tile};
    return smla_run_attention(work, &tiles, 1, error);
}

/* Opens the memory of `num_threads` threads, and `bytes` behind it. */
static smla_status
open_scratch(const smla_attention_params *params, int num_threads, int64_t bytes,
             smla_thread_scratch *scratch, smla_error *error)
{
    const int64_t counts[2] = {smla_pad_mha_dims(params->queries.dims[0] + params->queries.dims[1]),
                               smla_pad_mha_dims(params->kv.value_dim)};
    const int64_t part_bytes = smla_cpu_attention_scratch_bytes(true, counts);
    const int64_t num_parts = num_threads + (bytes + part_bytes - 1) / part_bytes;
    const smla_scratch_size size = {(int)num_parts, part_bytes};
    return smla_open_scratch(scratch, params->call.op, size, error);
}

smla_status
smla_attend_mha(const smla_attention_params *params, const smla_cpu_isa *isa, smla_error *error)
{
    smla_fill_rows_of_none(&params->padding, &params->visible.reqs, 0, 1, 0, 1);
    tile_cut cut = choose_cut(params);
    const smla_mha_parts parts = smla_plan_mha_parts(params);
    const int num_threads = smla_count_threads(cut.num_tasks + parts.num_parts);
    const int64_t numbers = (params->visible.reqs.num_reqs + 1) * (int64_t)sizeof *cut.before;
    if (cut.num_tasks + parts.num_parts == 0) {
        return SMLA_OK;
    }
    smla_thread_scratch scratch;
    SMLA_TRY(open_scratch(params, num_threads, parts.bytes + numbers, &scratch, error));
    smla_attention_work work = {params, isa, &scratch, NULL};
    uint8_t *const memory = smla_scratch_part(&scratch, num_threads);
    cut.before = (int64_t *)(void *)(memory + parts.bytes);
    smla_status status = cut.num_tasks > 0 ? attend_whole(&work, &cut, error) : SMLA_OK;
    if (status == SMLA_OK && parts.num_tiles > 0) {
        status = smla_attend_mha_parts(&work, &parts, memory, error);
    }
    smla_close_scratch(&scratch);
    return status;
}

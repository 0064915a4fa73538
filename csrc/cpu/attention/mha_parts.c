/* mha_parts.c: requests of multi-head attention whose keys are cut into parts. A part is a range of
 * the request's keys. A tile computes its rows over each part as if there were no other keys, into
 * fp32 rows of its own; then these are merged. So one long request is work for all threads. Parts
 * depend on a request's numbers of keys and rows alone, and no thread count changes a bit.
 */
#include "core/attention/merge_rows.h"
#include "cpu/attention/mha.h"
#include "cpu/isa.h"

enum {
    PART_KEYS = 1024, /* a part has so many keys at least, if the plan chooses */
    MOST_ROWS = 64,   /* a request with more rows per KV head has tiles enough, if it chooses */
    TILE_ROWS = 64,   /* a tile that has parts has so many rows, or those of one token */
};

/* Bytes of partial rows that a call holds at once. */
static const int64_t MOST_BYTES = 64 << 20;

/* ---- Cutting ------------------------------------------------------------------------------- */

/* The keys of a request that the rank has. */
static int64_t
count_own_keys(const smla_attention_params *params, const smla_kv_request *of)
{
    return smla_count_own(&params->visible.rule.share, of->num_keys);
}

int
smla_count_mha_parts(const smla_attention_params *params, int64_t req)
{
    if (params->results.num_splits != 0) {
        return params->results.num_splits;
    }
    const smla_kv_request of = smla_find_request(params, req);
    const int64_t parts = count_own_keys(params, &of) / PART_KEYS;
    return of.num_queries * smla_mha_group(params) > MOST_ROWS
               ? 1
               : (int)smla_clamp_int64(parts, 1, SMLA_MAX_SPLITS);
}

/* A tile, and where the partial rows of its parts lie: `out` [parts][rows][Dv], behind it `lse`
 * [parts][rows]. */
typedef struct part_tile {
    smla_mha_tile tile;    /* its rows are those of whole tokens */
    int64_t first_sibling; /* the first tile of its request among those that are computed at once */
    int64_t num_siblings;  /* tiles of that request among them; the first one alone has it */
    int64_t first_part;    /* counted in all tiles that are computed at once */
    int64_t columns;       /* keys of a part */
    int num_parts;
    float *out;
    float *lse;
} part_tile;

/* The tiles that are computed at once. */
typedef struct part_group {
    part_tile *tiles;
    int64_t num_tiles;
    int64_t num_parts;
} part_group;

/* The rows of a tile are those of whole tokens. */
static int64_t
count_tile_rows(const smla_attention_params *params)
{
    const int64_t group = smla_mha_group(params);
    return group > TILE_ROWS ? group : TILE_ROWS / group * group;
}

/* Floats of the partial rows of a request and a KV head. */
static int64_t
count_floats(const smla_attention_params *params, int num_parts, int64_t num_rows)
{
    return num_parts * num_rows * (params->kv.value_dim + 1);
}

smla_mha_parts
smla_plan_mha_parts(const smla_attention_params *params)
{
    const int64_t tile_rows = count_tile_rows(params);
    smla_mha_parts found = {0};
    int64_t all = 0;                                    /* floats of all tiles */
    int64_t most = MOST_BYTES / (int64_t)sizeof(float); /* those that are computed at once */
    for (int64_t req = 0; req < params->visible.reqs.num_reqs; req++) {
        const int num_parts = smla_count_mha_parts(params, req);
        const int64_t queries = smla_find_request(params, req).num_queries;
        const int64_t num_rows = queries * smla_mha_group(params);
        if (num_parts > 1 && num_rows > 0) {
            const int64_t num_tiles =
                (num_rows + tile_rows - 1) / tile_rows * params->kv.num_kv_heads;
            const int64_t least =
                count_floats(params, num_parts, num_rows < tile_rows ? num_rows : tile_rows);
            found.num_tiles += num_tiles;
            found.num_parts += num_tiles * num_parts;
            all += count_floats(params, num_parts, num_rows) * params->kv.num_kv_heads;
            most = least > most ? least : most;
        }
    }
    const int64_t bytes = found.num_tiles * (int64_t)sizeof(part_tile) +
                          (all < most ? all : most) * (int64_t)sizeof(float);
    found.bytes = (bytes + 63) / 64 * 64;
    return found;
}

/* Lists all tiles, with parts. */
static void
list_tiles(const smla_attention_params *params, part_tile *tiles)
{
    const int64_t group = smla_mha_group(params);
    const int64_t tile_rows = count_tile_rows(params);
    for (int64_t req = 0; req < params->visible.reqs.num_reqs; req++) {
        const int num_parts = smla_count_mha_parts(params, req);
        const smla_kv_request of = smla_find_request(params, req);
        const int64_t num_rows = num_parts > 1 ? of.num_queries * group : 0;
        for (int64_t head = 0; head < params->kv.num_kv_heads; head++) {
            for (int64_t row = 0; row < num_rows; row += tile_rows) {
                const int64_t left = num_rows - row;
                *tiles++ = (part_tile){
                    .tile = {.req = req,
                             .num_reqs = 1,
                             .kv_head = head,
                             .row = row,
                             .num_rows = (int)(left < tile_rows ? left : tile_rows),
                             .first_token = of.first_query + row / group,
                             .first_head = head * group},
                    .columns = smla_split_columns(count_own_keys(params, &of), num_parts),
                    .num_parts = num_parts,
                };
            }
        }
    }
}

/* Takes tiles from the front of `tiles`, as many as find room, and gives them memory. At least one
 * does. */
static part_group
take_group(const smla_attention_params *params, part_tile *tiles, int64_t num_tiles, float *memory)
{
    const float *const end = memory + MOST_BYTES / (int64_t)sizeof *memory;
    part_group group = {.tiles = tiles};
    while (group.num_tiles < num_tiles) {
        part_tile *const tile = &tiles[group.num_tiles];
        const int64_t floats = count_floats(params, tile->num_parts, tile->tile.num_rows);
        if (end - memory < floats && group.num_tiles > 0) {
            break;
        }
        const bool is_first = group.num_tiles == 0 || tile[-1].tile.req != tile->tile.req;
        tile->first_sibling = is_first ? group.num_tiles : tile[-1].first_sibling;
        tiles[tile->first_sibling].num_siblings = group.num_tiles - tile->first_sibling + 1;
        tile->first_part = group.num_parts;
        tile->out = memory;
        tile->lse = memory + floats / (params->kv.value_dim + 1) * params->kv.value_dim;
        memory += floats;
        group.num_parts += tile->num_parts;
        group.num_tiles++;
    }
    return group;
}

/* ---- Running ------------------------------------------------------------------------------- */

/* The tile that has a part. */
static const part_tile *
find_tile(const part_group *group, int64_t part)
{
    int64_t at = 0;
    for (int64_t past = group->num_tiles; past - at > 1;) {
        const int64_t middle = (at + past) / 2;
        if (group->tiles[middle].first_part <= part) {
            at = middle;
        } else {
            past = middle;
        }
    }
    return &group->tiles[at];
}

/* Runs a part of a tile. Those of a request go part by part, because the heads of a key lie side by
 * side. */
static void
run_part(const smla_attention_work *work, int64_t number)
{
    const part_group *const cut = work->cut;
    const part_tile *const first = &cut->tiles[find_tile(cut, number)->first_sibling];
    const part_tile *const of = first + (number - first->first_part) % first->num_siblings;
    const int64_t part = (number - first->first_part) / first->num_siblings;
    const int64_t group = smla_mha_group(work->params);
    const int64_t value_dim = work->params->kv.value_dim;
    smla_attention_params params = *work->params;
    smla_mha_tile tile = of->tile;
    tile.keys = (smla_key_range){part * of->columns, (part + 1) * of->columns};
    params.logits.sinks.values = NULL;
    params.results = (smla_results){
        .num_splits = 1,
        .out_type = SMLA_FLOAT_FP32,
        .out = of->out + part * tile.num_rows * value_dim,
        .out_stride_token = group * value_dim,
        .out_stride_head = value_dim,
        .lse = of->lse + part * tile.num_rows,
        .lse_stride_token = group,
        .lse_stride_head = 1,
    };
    work->isa->mha->run_tile(&params, &tile, smla_own_scratch(work->scratch));
}

/* Merges the partial rows of a tile. */
static void
merge_tile(const smla_attention_work *work, int64_t number)
{
    const part_tile *const of = &((const part_group *)work->cut)->tiles[number];
    const smla_attention_params *const params = work->params;
    const smla_merge_rows merged = smla_merge_rows_of(params);
    const int64_t group = smla_mha_group(params);
    for (int row = 0; row < of->tile.num_rows; row++) {
        smla_merge_part parts[SMLA_MAX_PARTS];
        for (int part = 0; part < of->num_parts; part++) {
            const int64_t at = (int64_t)part * of->tile.num_rows + row;
            parts[part] =
                (smla_merge_part){.out = of->out + at * merged.value_dim, .lse = of->lse + at};
        }
        smla_cpu_merge_row(work->isa->norm, &merged, parts, of->num_parts,
                           of->tile.first_token + row / group, of->tile.first_head + row % group);
    }
}

smla_status
smla_attend_mha_parts(const smla_attention_work *of, const smla_mha_parts *parts, void *memory,
                      smla_error *error)
{
    part_tile *tiles = memory;
    float *const rows = (float *)(tiles + parts->num_tiles);
    smla_attention_work work = *of;
    int64_t left = parts->num_tiles;
    smla_status status = SMLA_OK;
    list_tiles(work.params, tiles);
    while (left > 0 && status == SMLA_OK) {
        part_group group = take_group(work.params, tiles, left, rows);
        const smla_attention_loop loops[] = {
            {group.num_parts, smla_count_threads(group.num_parts), run_part},
            {group.num_tiles, smla_count_threads(group.num_tiles), merge_tile},
        };
        work.cut = &group;
        status = smla_run_attention(&work, loops, 2, error);
        tiles += group.num_tiles;
        left -= group.num_tiles;
    }
    return status;
}

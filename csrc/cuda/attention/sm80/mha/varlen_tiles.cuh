/* varlen_tiles.cuh: what a CTA of varlen_kernel.cuh computes at a time, and its shared memory. A
 * tile is up to ROWS query rows of one request that read the same KV head: (token, head of the
 * group) pairs, token by token. Only the device knows the requests' lengths, so the host starts
 * CTAs for the most tiles that there can be, and every CTA looks for its own.
 */
#pragma once

#include "cuda/attention/kernel_params.cuh"
#include "cuda/attention/keys/kv_pages.cuh"
#include "cuda/ptx/launch.cuh"

enum {
    CTA_WARPS = 4,
    CTA_THREADS = CTA_WARPS * SMLA_WARP_LANES,
    SEGMENT = 64,        /* 16-bit elements of a row in 128 bytes, whose chunks the swizzle mixes */
    SEGMENT_BYTES = 128, /* also the bytes between two rows of a segment */
    CHUNK = 8,           /* elements that are copied at once: 16 bytes in shared memory */
    SEGMENT_CHUNKS = SEGMENT / CHUNK,
    COPY_ROWS = CTA_THREADS / SEGMENT_CHUNKS, /* rows that all threads copy at once */
};

/* D, DV: dims of a query and of a value, padded. A warp has WARP_ROWS rows of the tile. The warps
 * that share rows have a part of the values each. A block has KEYS keys. */
template <int D_, int DV_, int WARP_ROWS_, int WARPS_ALONG_ROWS_, int KEYS_> struct varlen_shape {
    static constexpr int D = D_;
    static constexpr int DV = DV_;
    static constexpr int WARP_ROWS = WARP_ROWS_;
    static constexpr int WARPS_ALONG_ROWS = WARPS_ALONG_ROWS_;
    static constexpr int WARPS_ALONG_VALUES = CTA_WARPS / WARPS_ALONG_ROWS;
    static constexpr int ROWS = WARP_ROWS * WARPS_ALONG_ROWS;
    static constexpr int KEYS = KEYS_;
    static constexpr int WARP_VALUES = DV / WARPS_ALONG_VALUES;
    /* a warp's 16 x 8 pieces: of its scores M x N, of its out M x V */
    static constexpr int M = WARP_ROWS / 16;
    static constexpr int N = KEYS / 8;
    static constexpr int V = WARP_VALUES / 8;
};

/* The keys begin...end - 1 of a request. */
struct varlen_limits {
    uint32_t begin;
    uint32_t end;
};

/* How the rows of an array are copied. */
enum varlen_copy {
    COPY_CHUNKS = 1,    /* 16-bit elements, 16-byte aligned: without registers */
    COPY_ELEMENTS = 2,  /* 16-bit elements, 2-byte aligned */
    WIDEN_CHUNKS = 3,   /* e4m3, 8-byte aligned */
    WIDEN_ELEMENTS = 4, /* e4m3 at any byte */
};

/* Rows of queries, keys or values. Values have one part. */
struct varlen_source {
    const uint8_t *data[2];
    int64_t token_bytes[2];
    int64_t head_bytes[2];
    int32_t first_dim; /* elements of part 0 */
    int32_t dim;       /* elements of both parts */
    int32_t element_bytes;
    varlen_copy copy;
};

struct varlen_args {
    mha_params p;
    varlen_source q;
    varlen_source k;
    varlen_source v;
    smla_divisor group;         /* H / Hk */
    smla_divisor head_tiles;    /* the most tiles that a KV head can have */
    smla_divisor section_heads; /* KV heads whose tiles run at the same time */
    int64_t num_items;          /* Hk * head_tiles */
    int32_t num_segments;       /* segments of a query or key */
    bool out_is_paired;         /* two elements of out can be stored at once */
};

/* The same of keys that lie in pages, and may be cut into parts (paged_parts.cuh). */
struct paged_args : varlen_args {
    kv_pages pages;
    smla_divisor part_items; /* work items of a part */
    int32_t num_parts;       /* the most of a request */
    int64_t part_tokens;     /* result tokens of a part */
};

template <typename Args> constexpr bool IS_PAGED = false;
template <> constexpr bool IS_PAGED<paged_args> = true;

__device__ __forceinline__ smla_kv_request
find_request(const varlen_args &args, int64_t req)
{
    return smla_find_kv_request(&args.p.visible.reqs, &args.p.kv, NULL, req);
}

__device__ __forceinline__ smla_kv_request
find_request(const paged_args &args, int64_t req)
{
    return smla_find_kv_request(&args.p.visible.reqs, &args.p.kv, &args.pages.of, req);
}

struct varlen_tile {
    smla_kv_request request;
    int64_t req;
    int64_t kv_head;
    int64_t first_row; /* number in the request: token * group + head of the group */
    int32_t num_rows;
    int32_t part; /* its number among those of the keys, where these lie in pages */
};

/* A part of the rows of keys or values that a tile reads. */
struct varlen_part {
    const uint8_t *from; /* key 0 of the request, or the first token of page 0 */
    int64_t token_bytes;
};

enum varlen_part_idx { PART_K0 = 0, PART_K1 = 1, PART_V = 2, NUM_PARTS = 3 };

/* A row's 16-byte chunk c lies at c ^ row % 8 of its segment. */
template <typename Shape> struct varlen_memory {
    uint16_t queries[Shape::D / SEGMENT][Shape::ROWS][SEGMENT];
    uint16_t keys[Shape::D / SEGMENT][Shape::KEYS][SEGMENT];
    uint16_t values[Shape::DV / SEGMENT][Shape::KEYS][SEGMENT];
    varlen_limits limits[Shape::ROWS]; /* each row's; 0, 0: the row sees no key */
    varlen_part parts[NUM_PARTS];
    varlen_tile tile; /* here, because the loop over blocks needs the registers */
};

template <typename Shape> struct paged_memory : varlen_memory<Shape> {
    int32_t entries[2][Shape::KEYS]; /* the table's, of a block and of the next one */
    float part_factors[2];           /* what the two parts of q . k are multiplied with */
};

/* A query row's place. */
struct varlen_row {
    int64_t query; /* number in the request */
    int64_t head;
};

__device__ __forceinline__ int
lane_idx(void)
{
    return (int)threadIdx.x % SMLA_WARP_LANES;
}

__device__ __forceinline__ varlen_row
find_row(const varlen_args &args, const varlen_tile &tile, int row)
{
    const int64_t number = tile.first_row + row;
    const int64_t query = smla_divide(number, args.group);
    return varlen_row{query,
                      tile.kv_head * args.group.divisor + number - query * args.group.divisor};
}

/* Finds a KV head's tile `number`, or returns false where there are fewer. Tiles are numbered
 * request by request. In a request, the last rows come first, because causal masks give them the
 * most keys. Each warp searches by itself, 32 requests at a time. */
template <typename Shape, typename Args>
__device__ __forceinline__ bool
find_head_tile(const Args &args, int64_t number, varlen_tile *tile)
{
    const int64_t group = args.group.divisor;
#pragma unroll 1
    for (int64_t first = 0; first < args.p.visible.reqs.num_reqs; first += SMLA_WARP_LANES) {
        const int64_t own = first + lane_idx();
        int64_t count = 0;
        if (own < args.p.visible.reqs.num_reqs) {
            count = (find_request(args, own).num_queries * group + Shape::ROWS - 1) / Shape::ROWS;
        }
        const int64_t sum = smla_scan_lanes(count, lane_idx());
        const uint32_t past = __ballot_sync(ALL_LANES, number < sum);
        if (past != 0) {
            const int owner = __ffs((int)past) - 1;
            tile->req = first + owner;
            tile->request = find_request(args, tile->req);
            const int64_t last = __shfl_sync(ALL_LANES, sum, owner) - 1;
            tile->first_row = (last - number) * Shape::ROWS;
            const int64_t left = tile->request.num_queries * group - tile->first_row;
            tile->num_rows = (int32_t)(left < Shape::ROWS ? left : Shape::ROWS);
            return true;
        }
        number -= __shfl_sync(ALL_LANES, sum, SMLA_WARP_LANES - 1);
    }
    return false;
}

/* Finds the tile of a work item, or returns false. The heads of a section come first, then the
 * tiles of a head, then sections, so that the keys and values that are read at the same time fit in
 * L2. */
template <typename Shape, typename Args>
__device__ __forceinline__ bool
find_tile(const Args &args, int64_t item, varlen_tile *tile)
{
    const int64_t row = smla_divide(item, args.section_heads);
    const int64_t section = smla_divide(row, args.head_tiles);
    tile->kv_head = section * args.section_heads.divisor + item - row * args.section_heads.divisor;
    return find_head_tile<Shape>(args, row - section * args.head_tiles.divisor, tile);
}

/* ---- Which keys rows see ------------------------------------------------------------------- */

/* Stores the limits of the tile's rows. They see no keys but those of `part`. */
template <typename Shape, typename Args>
__device__ __forceinline__ void
store_limits(const Args &args, const varlen_tile &tile, const varlen_limits &part,
             varlen_limits *limits)
{
    for (int row = (int)threadIdx.x; row < Shape::ROWS; row += CTA_THREADS) {
        varlen_limits own = {0, 0};
        if (row < tile.num_rows) {
            const smla_key_range range = smla_find_kv_range(&args.p.visible.rule, &tile.request,
                                                            find_row(args, tile, row).query);
            if (range.begin < range.end) {
                own = varlen_limits{(uint32_t)range.begin, (uint32_t)range.end};
            }
            if constexpr (IS_PAGED<Args>) {
                own = varlen_limits{max(own.begin, part.begin), min(own.end, part.end)};
                own = own.begin < own.end ? own : varlen_limits{0, 0};
            }
        }
        limits[row] = own;
    }
}

/* What `count` rows see: any of them, and each of them. */
struct varlen_view {
    varlen_limits any; /* an empty range if no row sees a key */
    varlen_limits each;
};

template <int ROWS>
__device__ __forceinline__ varlen_view
merge_limits(const varlen_limits *limits, int count)
{
    varlen_view view = {{UINT32_MAX, 0}, {0, UINT32_MAX}};
#pragma unroll
    for (int first = 0; first < ROWS; first += SMLA_WARP_LANES) {
        const int row = first + lane_idx();
        if (row < ROWS && row < count) {
            const varlen_limits own = limits[row];
            if (own.begin < own.end) {
                view.any.begin = min(view.any.begin, own.begin);
                view.any.end = max(view.any.end, own.end);
            }
            view.each.begin = max(view.each.begin, own.begin);
            view.each.end = min(view.each.end, own.end);
        }
    }
    view.any.begin = __reduce_min_sync(ALL_LANES, view.any.begin);
    view.any.end = __reduce_max_sync(ALL_LANES, view.any.end);
    view.each.begin = __reduce_max_sync(ALL_LANES, view.each.begin);
    view.each.end = __reduce_min_sync(ALL_LANES, view.each.end);
    return view;
}

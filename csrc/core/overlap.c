/* overlap.c: implements overlap.h, as a question about sums.
 *
 * Take the last byte of a, and go back to the first byte of b. If the arrays share a byte, the way
 * leads through it: down in a by a's strides, each fewer times than its dimension has elements,
 * then down in b by b's strides, and by the bytes inside the two elements. So arrays overlap
 * exactly if the distance is a sum of such steps.
 *
 * The steps are tried from the longest to the shortest. What the shorter steps add up to leaves one
 * number of longer steps where each step is a multiple of the next, and few otherwise.
 */
#include "core/overlap.h"

/* A step of some length, which is taken at most `most` times. */
typedef struct step {
    int64_t length; /* > 0 */
    int64_t most;   /* > 0 */
} step;

enum {
    MOST_STEPS = 2 * SMLA_MAX_RANK + 1, /* the strides of two arrays, and the bytes of elements */
    MOST_TRIES = 1000, /* sums that are looked at; steps of 2 and 3 along one axis take about 10 */
};

/* Steps, the shortest first. */
typedef struct step_list {
    int count;
    int num_tries;
    step steps[MOST_STEPS];
    int64_t rests[MOST_STEPS]; /* what all shorter steps add up to at most */
    int64_t tries[MOST_STEPS]; /* count_tries; 0: it was not asked for */
} step_list;

static void
add_step(step_list *list, int64_t length, int64_t most)
{
    int at = list->count;
    if (length == 0 || most <= 0) {
        return;
    }
    while (at > 0 && list->steps[at - 1].length > length) {
        at--;
    }
    if (at > 0 && list->steps[at - 1].length == length) {
        list->steps[at - 1].most += most;
        return;
    }
    for (int i = list->count; i > at; i--) {
        list->steps[i] = list->steps[i - 1];
    }
    list->steps[at] = (step){length, most};
    list->count++;
}

static int64_t
stride_length(const DLTensor *tensor, int dim)
{
    const int64_t stride = smla_stride(tensor, dim);
    return stride < 0 ? -stride : stride;
}

/* Adds the strides of an array of elements that are `unit` long. */
static void
add_strides(step_list *list, const DLTensor *tensor, int64_t unit)
{
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        add_step(list, stride_length(tensor, i) * unit, tensor->shape[i] - 1);
    }
}

/* Puts a step into a shorter one that divides it, where the shorter one leaves no gap: 5 steps of 2
 * and 3 of 12 are 23 steps of 2. */
static void
join_steps(step_list *list)
{
    int last = 0;
    for (int i = 1; i < list->count; i++) {
        step *const shorter = &list->steps[last];
        const step longer = list->steps[i];
        if (longer.length <= shorter->length * (shorter->most + 1) &&
            longer.length % shorter->length == 0) {
            shorter->most += longer.length / shorter->length * longer.most;
        } else {
            list->steps[++last] = longer;
        }
    }
    list->count = last + 1;
}

static int64_t
gcd(int64_t a, int64_t b)
{
    while (b != 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* How many numbers of steps of one length must be tried, from the least that can reach a target on.
 *
 * Let l be this length, s a shorter one, g their greatest common divisor. A sum with s / g steps of
 * l less and l / g steps of s more is the same. It has too many steps of s only if all other
 * shorter steps leave no room for them. */
static int64_t
count_tries(step_list *list, int at)
{
    const int64_t length = list->steps[at].length;
    int64_t fewest = list->tries[at] > 0 ? list->tries[at] : INT64_MAX;
    for (int i = 0; i < at && list->tries[at] == 0; i++) {
        const step shorter = list->steps[i];
        const int64_t others = list->rests[at] - shorter.length * shorter.most;
        const int64_t period = shorter.length / gcd(length, shorter.length);
        const int64_t room = others < shorter.length ? 0 : (others - shorter.length) / length + 1;
        fewest = period + room < fewest ? period + room : fewest;
    }
    list->tries[at] = fewest;
    return fewest;
}

/* Whether a target is a sum of the steps 0...at. */
static bool
is_sum(step_list *list, int at, int64_t target)
{
    if (target == 0) {
        return true;
    }
    if (at < 0 || ++list->num_tries > MOST_TRIES) {
        return false;
    }
    const step own = list->steps[at];
    const int64_t missing = target - list->rests[at];
    const int64_t first = missing <= 0 ? 0 : (missing - 1) / own.length + 1;
    int64_t last = target / own.length < own.most ? target / own.length : own.most;
    if (last - first > 1) {
        const int64_t num_tries = count_tries(list, at);
        last = last - first < num_tries ? last : first + num_tries - 1;
    }
    for (int64_t n = first; n <= last; n++) {
        if (is_sum(list, at - 1, target - n * own.length)) {
            return true;
        }
    }
    return false;
}

static smla_overlap
find_sum(step_list *list, int64_t target)
{
    int64_t rest = 0;
    if (list->count > 0) {
        join_steps(list);
    }
    for (int i = 0; i < list->count; i++) {
        list->rests[i] = rest;
        list->tries[i] = 0;
        rest += list->steps[i].length * list->steps[i].most;
    }
    list->num_tries = 0;
    if (is_sum(list, list->count - 1, target)) {
        return SMLA_OVERLAP_SOME;
    }
    return list->num_tries > MOST_TRIES ? SMLA_OVERLAP_UNKNOWN : SMLA_OVERLAP_NONE;
}

smla_overlap
smla_find_overlap(const DLTensor *a, const DLTensor *b)
{
    smla_byte_range range_a;
    smla_byte_range range_b;
    if (!smla_find_byte_range(a, &range_a) || !smla_find_byte_range(b, &range_b)) {
        return SMLA_OVERLAP_UNKNOWN;
    }
    if (smla_is_apart(range_a, range_b)) {
        return SMLA_OVERLAP_NONE;
    }
    const int64_t bytes_a = smla_element_bytes(a);
    const int64_t bytes_b = smla_element_bytes(b);
    step_list list = {.count = 0};
    add_step(&list, 1, bytes_a + bytes_b - 2);
    add_strides(&list, a, bytes_a);
    add_strides(&list, b, bytes_b);
    return find_sum(&list, (intptr_t)range_a.high - 1 - (intptr_t)range_b.low);
}

/* Whether no stride reaches back: each is longer than the way over all later dimensions. An empty
 * array has no way. */
static bool
is_nested(const DLTensor *tensor)
{
    int64_t reach = 0;
    for (int i = tensor->ndim - 1; i >= 0 && !smla_is_empty(tensor); i--) {
        const int64_t stride = smla_stride(tensor, i);
        if (tensor->shape[i] > 1 && stride <= reach) {
            return false;
        }
        reach += (tensor->shape[i] - 1) * stride;
    }
    return true;
}

/* Whether an element is another one's, whose index in dimension `dim` is larger, and equal in those
 * before it: steps of this stride, at least one, are undone by later ones, up and down. */
static smla_overlap
find_way_back(const DLTensor *tensor, int dim)
{
    step_list list = {.count = 0};
    const int64_t stride = stride_length(tensor, dim);
    int64_t reach = 0;
    add_step(&list, stride, tensor->shape[dim] - 2);
    for (int i = dim + 1; i < tensor->ndim; i++) {
        add_step(&list, stride_length(tensor, i), 2 * (tensor->shape[i] - 1));
        reach += stride_length(tensor, i) * (tensor->shape[i] - 1);
    }
    return reach < stride ? SMLA_OVERLAP_NONE : find_sum(&list, reach - stride);
}

smla_overlap
smla_find_own_overlap(const DLTensor *tensor)
{
    smla_overlap found = SMLA_OVERLAP_NONE;
    if (is_nested(tensor)) {
        return found;
    }
    for (int i = 0; i < tensor->ndim && found != SMLA_OVERLAP_SOME; i++) {
        const smla_overlap here =
            tensor->shape[i] > 1 ? find_way_back(tensor, i) : SMLA_OVERLAP_NONE;
        found = here != SMLA_OVERLAP_NONE ? here : found;
    }
    return found;
}

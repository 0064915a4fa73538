/* fuzz_main.h: runs a fuzzer without libFuzzer, on the files named on the command line (inputs that
 * once failed) or on random inputs.
 */
#pragma once

#include "fuzz_input.h"

enum { MAX_INPUT = 128 };

static inline void
run_random_inputs(int num_inputs)
{
    for (int i = 0; i < num_inputs; i++) {
        uint8_t input[MAX_INPUT];
        const size_t size = (size_t)random_int(MAX_INPUT);
        for (size_t at = 0; at < size; at++) {
            /* Small bytes choose edge values, so half of the bytes are small. */
            const uint64_t bits = random_bits() >> 20;
            input[at] = (uint8_t)(bits & 1 ? bits >> 1 : bits >> 1 & 31);
        }
        LLVMFuzzerTestOneInput(input, size);
    }
}

static inline int
replay(const char *path)
{
    static uint8_t input[1 << 16];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        return 1;
    }
    const size_t size = fread(input, 1, sizeof input, file);
    fclose(file);
    LLVMFuzzerTestOneInput(input, size);
    num_passed++;
    return 0;
}

/* Runs the files. Returns whether all could be read. */
static inline bool
replay_all(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (replay(argv[i]) != 0) {
            return false;
        }
    }
    return true;
}

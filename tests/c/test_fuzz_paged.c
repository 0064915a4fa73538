/* test_fuzz_paged.c: runs fuzz_paged.c without libFuzzer, see fuzz_main.h.
 */
#include "fuzz_paged.c" // NOLINT(bugprone-suspicious-include): one program, with its own main

#include "fuzz_main.h"

static void
test_random_inputs(void)
{
    run_random_inputs(20000);
}

int
main(int argc, char **argv)
{
    if (!replay_all(argc, argv)) {
        return EXIT_FAILURE;
    }
    if (argc == 1) {
        RUN(test_random_inputs);
    }
    return report("test_fuzz_paged");
}

"""The stages of scripts/gpu_check.sh, one module each, in the order of their names.

A stage is a module `stage_NN_NAME.py` with

    SECONDS            its time limit
    NEEDS              packages without which it is skipped
    records(library)   yields dicts, which become lines of records.jsonl

and a docstring whose first line is its title in the report. `library` is None on a CUDA device. In
a dry run it is the library of emulated kernels, and the stage uses its smallest sizes. Every stage
is a process of its own, so that a stage that hangs or loses the device ends alone. The limits of
all stages add up to at most 8 minutes (ALL_SECONDS); stages that matter most come first.
"""

"""The stages of scripts/gpu_check.sh: one module each, in the order of their names.

A stage is a module `stage_NN_NAME.py` here with

    SECONDS          how long it may take
    NEEDS            packages without which it is skipped, by name
    def records()    yields dicts, which become lines of records.jsonl

and a docstring whose first line is its title in the report. A later kernel adds a stage by adding a
file. Every stage is a process of its own, so that one that hangs or loses the device ends alone.
"""

"""Files and folders: written completely or not at all, replaced only if oper wrote everything.

In: content to write, folders to open. Out: paths on disk, JSON, YAML, arrays. Imports: base.
"""

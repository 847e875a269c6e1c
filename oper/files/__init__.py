"""Files and folders that are written whole, and replaced only where they are wholly ours.

In: content to write, folders to open. Out: paths on disk, JSON, YAML, arrays. Imports: base.
"""

"""Basics that every package uses: errors, array types, the native library, free memory.

In and out: Python's and NumPy's own types. Imports: nothing of oper.
"""

"""What every package stands on: errors, array types, the native library, free memory.

In and out: Python's and NumPy's own types. Imports: nothing of oper.
"""

"""OPER: row-level sharding of embedding tables, planned from how often each row is accessed."""

__version__ = "0.1.0"

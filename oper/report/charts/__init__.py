"""The charts of a report, each made from a plan's figures or a command's JSON."""
